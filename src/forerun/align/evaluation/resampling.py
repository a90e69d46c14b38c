"""Intervals over prompts: whole prompts are resampled, for steps within one are not independent."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.theory.intervals import Interval, bootstrap_ratio

__all__ = ["over_prompts"]


def over_prompts(
    numerators: Sequence[float],
    denominators: Sequence[float],
    bounds: tuple[float, float],
    *,
    seed: int,
) -> Interval | None:
    """sum(numerators) / sum(denominators) with its 95% bootstrap interval.

    Args:
        numerators: one per prompt.
        denominators: of the same prompts; those with 0 were not observed and are left out.
        bounds: what the ratio can be at all: one prompt alone narrows it down no further.
        seed: decides the resamples.

    Returns:
        None where no prompt was observed.
    """
    seen = [pair for pair in zip(numerators, denominators, strict=True) if pair[1] > 0]
    if not seen:
        return None
    above, below = zip(*seen, strict=True)
    if len(seen) == 1:
        return Interval(estimate=above[0] / below[0], low=bounds[0], high=bounds[1])
    return bootstrap_ratio(above, below, seed=seed)
