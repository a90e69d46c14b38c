"""The `auto` controller with one mechanism switched off: what is replaced, and how it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forerun.control import allocation, goodput, probes
from forerun.control.base import Controller
from forerun.control.config import BeliefConfig, GoodputConfig
from forerun.control.goodput import GoodputController
from forerun.control.learned_costs import LearnedCosts
from forerun.control.safety import SafeController
from forerun.control.step_times import TimeFactor
from forerun.theory.drift import Memory

__all__ = ["VARIANTS"]

Make = Callable[[Mapping[str, Any], int], Controller]


def auto(config: GoodputConfig | None = None) -> Make:
    """The safe goodput controller with these settings."""
    return lambda costs, max_k: SafeController(GoodputController(costs, max_k, config))


def without_profile(costs: Mapping[str, Any], max_k: int) -> Controller:
    """`auto` that learns costs from the steps."""
    return SafeController(GoodputController(LearnedCosts(tuple(costs), max_k), max_k))


def uniform(self: Any, max_nodes: int) -> Any:
    """The best K that is the same for all requests."""
    deepest = max(len(c.curve.survival) for c in self.candidates)
    found = [self.at([k] * len(self.candidates)) for k in range(deepest + 1)]
    return max((a for a in found if sum(a.depths) <= max_nodes), key=lambda a: a.tokens_per_s)


def ignore(self: Any, measured_s: float, expected_s: float) -> None:
    """Learn nothing."""


def goodput_alone(costs: Mapping[str, Any], max_k: int) -> Controller:
    """Goodput that is not compared with plain decoding."""
    return GoodputController(costs, max_k)


def no_tree(self: Any, *inputs: Any) -> None:
    """Plan chains only."""


ONE_MEMORY = BeliefConfig(
    request=Memory(surprise=1e9), pool=Memory(slow=0.99, fast=0.9, surprise=1e9)
)
NO_CORRECTION = [(TimeFactor, "observe", ignore)]
VARIANTS: Mapping[str, tuple[list[tuple[Any, str, Any]], Make]] = {
    "auto": ([], auto()),
    "without a profile": ([], without_profile),
    "no probes while idle": ([], auto(GoodputConfig(probe_share=0.0))),
    "probes do not follow one another": ([(probes, "FOLLOWING", 0)], auto()),
    "no exploration of other depths and drafters": ([], auto(GoodputConfig(explore=0.0))),
    "one memory of acceptance, not two": ([], auto(GoodputConfig(beliefs=ONE_MEMORY))),
    "no acceptance of its own per request": (
        [],
        auto(GoodputConfig(beliefs=BeliefConfig(strength=1e9))),
    ),
    "one K for the batch": ([(allocation.BatchAllocator, "best", uniform)], auto()),
    "no correction of costs": (NO_CORRECTION, auto()),
    "no watch over the speed": ([], goodput_alone),
    "neither correction nor watch": (NO_CORRECTION, goodput_alone),
    "no trees": ([(goodput.GoodputController, "_best_tree", no_tree)], auto()),
    "no switch margin": ([], auto(GoodputConfig(switch_margin=0.0))),
    "no plan reuse": ([(goodput, "DRAFTING_REUSE", 1), (goodput, "PLAIN_REUSE", 1)], auto()),
}
