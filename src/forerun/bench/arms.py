"""Arms over one loaded target: plain decoding, and every K of every draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forerun.bench.compare import Arm
from forerun.bench.config import DraftArms
from forerun.engine.engine import Engine
from forerun.sampling.config import SamplingParams

__all__ = ["draft_arms", "plain_arm", "warm_up"]

WARM_UP_TOKENS = 8


def plain_arm(target: Engine) -> Arm:
    """The baseline."""
    return Arm(name="plain", method="plain", num_speculative_tokens=0, engine=target)


def draft_arms(target: Engine, wanted: DraftArms, *, dtype: str = "auto") -> tuple[Arm, ...]:
    """One arm per K, all over the same loaded target and draft."""
    loaded = target.with_draft(wanted.draft, max(wanted.ks), dtype=dtype)
    assert loaded.drafter is not None
    return tuple(
        Arm(
            name=f"{wanted.name} K={k}",
            method=loaded.drafter.drafter.method,
            num_speculative_tokens=k,
            engine=target.with_draft(loaded.drafter.drafter, k),
            draft=wanted.draft,
        )
        for k in wanted.ks
    )


def warm_up(arms: Sequence[Arm], text: str, clock: Callable[[], float]) -> float:
    """Let every arm generate twice, so that no measurement pays for a first time.

    Returns:
        Seconds per token of all arms together, from the second time.
    """
    params = SamplingParams(temperature=0, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
    seconds = 0.0
    for arm in arms:
        arm.engine.generate([text], params)
        start_s = clock()
        arm.engine.generate([text], params)
        seconds += clock() - start_s
    return seconds / WARM_UP_TOKENS
