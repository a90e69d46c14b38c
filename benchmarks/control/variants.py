"""The `auto` controller with one mechanism switched off: what is replaced, and how it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forerun.control import (
    allocation,
    exploration,
    goodput,
    safety,
    settled,
    step_times,
)
from forerun.control.bandit import BanditController
from forerun.control.base import Controller
from forerun.control.beliefs import Beliefs
from forerun.control.config import BeliefConfig, GoodputConfig, SafetyConfig
from forerun.control.exploration import Exploration
from forerun.control.goodput import GoodputController
from forerun.control.punctuality import StepTimeRatios
from forerun.control.safety import SafeController
from forerun.control.step_times import CostCell, TimeCorrection, TimeFactor
from forerun.theory.drift import Memory

__all__ = ["VARIANTS"]

Make = Callable[[Mapping[str, Any], int], Controller]


def auto(config: GoodputConfig | None = None, safety: SafetyConfig | None = None) -> Make:
    """The safe goodput controller with these settings."""
    return lambda costs, max_k: SafeController(GoodputController(costs, max_k, config), safety)


def never_close(self: Exploration, *args: Any, **kwargs: Any) -> None:
    OBSERVE(self, *args, **kwargs)
    self._follows = False


def uniform(self: Any, max_nodes: int) -> Any:
    """The best K that is the same for all."""
    deepest = max(len(c.curve.survival) for c in self.candidates)
    found = [self.at([k] * len(self.candidates)) for k in range(deepest + 1)]
    fits = [a for a in found if sum(a.depths) <= max_nodes]
    return max(fits, key=lambda a: a.tokens_per_s)


def ignore(self: Any, measured_s: float, expected_s: float) -> None:
    return None


OBSERVE = Exploration.observe
NO_CHANGES = Memory(surprise=1e9)
POOL = BeliefConfig().pool
VARIANTS: Mapping[str, tuple[list[tuple[Any, str, Any]], Make]] = {
    "auto": ([], auto()),
    "no probes while idle": ([(Exploration, "_probing", lambda self, plans, *a: plans)], auto()),
    "no probe right after a good one": ([(Exploration, "observe", never_close)], auto()),
    "probe share does not adapt": (
        [(Exploration, "_share", lambda self, method: self.config.probe_share)],
        auto(),
    ),
    "every idle request probes": ([(exploration, "SCOUTS", 1)], auto()),
    "probes do not wait for text": ([(exploration, "LEAST_TEXT", 0)], auto()),
    "no exploration of K + 1 and other drafters": ([], auto(GoodputConfig(explore=0.0))),
    "acceptance does not fade while idle": ([(goodput, "IDLE_MEMORY", 1.0)], auto()),
    "one memory of acceptance, not two": (
        [],
        auto(
            GoodputConfig(
                beliefs=BeliefConfig(
                    request=NO_CHANGES,
                    pool=Memory(slow=POOL.slow, fast=POOL.fast, surprise=1e9),
                )
            )
        ),
    ),
    "no acceptance of its own per request": (
        [],
        auto(GoodputConfig(beliefs=BeliefConfig(strength=1e9))),
    ),
    "no pool by tags": (
        [(Beliefs, "_pool", lambda self, kind, way: pool_prospects(self, way))],
        auto(),
    ),
    "one K for the batch": ([(allocation.BatchAllocator, "best", uniform)], auto()),
    "no candidate depths": ([(step_times, "candidate_depths_of", lambda deltas_s: ())], auto()),
    "no correction of costs": ([(TimeFactor, "observe", ignore)], auto()),
    "costs at one context": (
        [(CostCell, "of", classmethod(lambda cls, batch, context: cls(batch, 1)))],
        auto(),
    ),
    "costly drafters do not stay costly": (
        [(step_times, "DEAR_MEMORY", step_times.MEMORY)],
        auto(),
    ),
    "corrections do not fade": ([(TimeCorrection, "fade", lambda self: None)], auto()),
    "no switch margin": ([], auto(GoodputConfig(hysteresis=0.0))),
    "no cost of catching up": ([], auto(GoodputConfig(catch_up=0.0))),
    "drafter chosen at every decision": ([(goodput, "ROUTE_EVERY", 1)], auto()),
    "no plan reuse": (
        [(goodput, "MOST_PATIENCE", 1), (goodput, "PLAIN_PATIENCE", 1), (settled, "MOST_LONG", 1)],
        auto(),
    ),
    "no plan reuse while drafting": ([(goodput, "MOST_PATIENCE", 1)], auto()),
    "time targets without a quantile": (
        [(StepTimeRatios, "p95", property(lambda self: 1.0))],
        auto(),
    ),
    "steps learnt from one by one": ([(goodput, "MOST_UNREAD", 1)], auto()),
    "no watch over the speed (goodput)": (
        [],
        lambda costs, max_k: GoodputController(costs, max_k),
    ),
    "watch: one bucket for all": ([(safety, "bucket_of", lambda states: (0, 0))], auto()),
    "watch: no second test after 256 steps": (
        [],
        auto(safety=SafetyConfig(num_speculative=10**9)),
    ),
    "watch: probes are not refused": ([], auto(safety=SafetyConfig(probe_loss=1e9))),
    "watch: plain steps one at a time": ([(safety, "NUM_IN_A_ROW", 1)], auto()),
    "watch: no longer retry": ([], auto(safety=SafetyConfig(longest_retry=64))),
    "bandit instead": ([], lambda costs, max_k: BanditController(tuple(costs), max_k)),
    "bandit, watched": (
        [],
        lambda costs, max_k: SafeController(BanditController(tuple(costs), max_k)),
    ),
}


def pool_prospects(self: Beliefs, way: Any) -> Any:
    """The one pool of a drafter, whatever requests are like."""
    return POOL_OF(self, ((), 0.0), way)


POOL_OF = Beliefs._pool
