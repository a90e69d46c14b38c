"""The arms of the demonstration: one loaded target, several drafts and K over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forerun.bench.compare import Arm
from forerun.bench.config import DemoConfig
from forerun.engine.engine import Engine
from forerun.sampling.config import SamplingParams

__all__ = ["Arms", "load_arms", "warm_up"]

METHOD = "draft_model"
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Arms:
    """The engines of the demonstration, all over one target."""

    plain: Arm
    general: Arm
    domain: tuple[Arm, ...]


def load_arms(config: DemoConfig) -> Arms:
    """One target; one engine per draft and K over it."""
    target = Engine.load(config.target, config=config.engine)
    domain = target.with_draft(config.domain_draft, max(config.domain_ks))
    assert domain.drafter is not None
    drafter = domain.drafter.drafter
    return Arms(
        plain=Arm(name="plain", method="plain", num_speculative_tokens=0, engine=target),
        general=Arm(
            name=f"off-the-shelf K={config.general_k}",
            method=METHOD,
            num_speculative_tokens=config.general_k,
            engine=target.with_draft(config.general_draft, config.general_k),
        ),
        domain=tuple(
            Arm(
                name=f"domain draft K={k}",
                method=METHOD,
                num_speculative_tokens=k,
                engine=target.with_draft(drafter, k),
            )
            for k in config.domain_ks
        ),
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
