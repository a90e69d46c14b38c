"""Speedup predicted from acceptance counts and a cost table, for every K and at the best one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.align.evaluation.judged import JudgedPrompt, over_prompts
from forerun.theory.cost import CostTable
from forerun.theory.intervals import Interval

__all__ = ["PredictedSpeedup", "predicted_speedup"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedSpeedup:
    """Predicted speedup of speculative over plain decoding.

    Attributes:
        num_speculative_tokens: the K in 0..max of highest speedup; 0 if drafting costs more
            than it saves.
        best: speedup at the best K, which the one half of the prompts chooses for the other.
        per_k: speedup at K = 1, 2, ...
    """

    num_speculative_tokens: int
    best: Interval
    per_k: tuple[Interval, ...]

    @property
    def at_max_k(self) -> Interval:
        """Speedup at the K that was judged."""
        return self.per_k[-1]

    @property
    def best_drafting(self) -> float:
        """The highest speedup of any K above 0, by which drafts are ranked.

        Not `best`, which is 1 of all drafts that do not pay yet.
        """
        return max(speedup.estimate for speedup in self.per_k)


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleCost:
    """Cost of a step with K drafted tokens, in plain steps (kappa)."""

    num_speculative_tokens: int
    cost: Interval


def predicted_speedup(
    prompts: Sequence[JudgedPrompt], table: CostTable, max_k: int, *, seed: int
) -> PredictedSpeedup | None:
    """Predict the speedup, tau over kappa, for one sequence at the mean context of the steps.

    The best of several K is flattered by the prompts it won on. So every second prompt chooses the
    K that the others are scored at, and the other way round.

    Args:
        prompts: judged at K = `max_k`.
        table: of this draft's shape beside the target.
        max_k: largest K to consider.
        seed: decides the resamples.

    Returns:
        None where nothing was drafted, or the table is too rough to bound kappa from below.
    """
    prompts = [prompt for prompt in prompts if prompt.acceptance.num_steps]
    if not prompts:
        return None
    num_steps = sum(prompt.acceptance.num_steps for prompt in prompts)
    context = round(sum(prompt.num_context_tokens for prompt in prompts) / num_steps)
    cycles = [
        CycleCost(num_speculative_tokens=k, cost=table.cycle_cost_interval(k, context))
        for k in range(max_k + 1)
    ]
    if any(cycle.cost.low <= 0 for cycle in cycles):
        return None
    even, odd = prompts[::2], prompts[1::2]
    chosen = [best_of(odd or even, cycles), best_of(even, cycles)]
    return PredictedSpeedup(
        num_speculative_tokens=best_of(prompts, cycles).num_speculative_tokens,
        best=speedup_of(prompts, [chosen[i % 2] for i in range(len(prompts))], seed),
        per_k=tuple(speedup_of(prompts, [cycle] * len(prompts), seed) for cycle in cycles[1:]),
    )


def best_of(prompts: Sequence[JudgedPrompt], cycles: Sequence[CycleCost]) -> CycleCost:
    """Return the cycle of the highest speedup; the shortest of equals."""

    def speedup(cycle: CycleCost) -> float:
        emitted = sum(prompt.num_emitted_at(cycle.num_speculative_tokens) for prompt in prompts)
        return emitted / cycle.cost.estimate

    return max(cycles, key=speedup)


def speedup_of(prompts: Sequence[JudgedPrompt], cycles: Sequence[CycleCost], seed: int) -> Interval:
    """Return emitted tokens over the time of as many plain steps, with a K per prompt.

    The errors of prompts and table are independent of each other, so they add up in quadrature.
    """
    pairs = [*zip(prompts, cycles, strict=True)]
    emitted = [float(prompt.num_emitted_at(c.num_speculative_tokens)) for prompt, c in pairs]
    spent = [prompt.acceptance.num_steps * cycle.cost.estimate for prompt, cycle in pairs]
    bounds = (
        min(1 / cycle.cost.estimate for cycle in cycles),
        max((1 + cycle.num_speculative_tokens) / cycle.cost.estimate for cycle in cycles),
    )
    found = over_prompts(emitted, spent, bounds, seed=seed)
    assert found is not None
    slower = max(cycle.cost.high / cycle.cost.estimate for cycle in cycles)
    faster = min(cycle.cost.low / cycle.cost.estimate for cycle in cycles)
    below = math.hypot(found.estimate - found.low, found.estimate * (1 - 1 / slower))
    above = math.hypot(found.high - found.estimate, found.estimate * (1 / faster - 1))
    return Interval(
        estimate=found.estimate,
        low=max(0.0, found.estimate - below),
        high=found.estimate + above,
    )
