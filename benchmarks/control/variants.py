"""The `auto` controller with one mechanism switched off: what is replaced, and how it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forerun.control import goodput
from forerun.control.allocation import Allocation, best_chains
from forerun.control.base import Controller
from forerun.control.config import GoodputConfig
from forerun.control.costs import CostModel
from forerun.control.goodput import GoodputController

__all__ = ["VARIANTS"]

Make = Callable[[Mapping[str, Any], int], Controller]


def auto(**changes: Any) -> Make:
    """The goodput controller with these settings."""
    return lambda costs, max_k: GoodputController(costs, max_k, GoodputConfig(**changes))


def without_profile(costs: Mapping[str, Any], max_k: int) -> Controller:
    """`auto` that learns costs from the steps."""
    return GoodputController(dict.fromkeys(costs), max_k)


def uniform(candidates: Sequence[Any], times: Mapping[str, Any], max_nodes: int) -> Allocation:
    """The best K that is the same for all requests."""
    deepest = max(len(candidate.curve.survival) for candidate in candidates)
    found = []
    for k in range(deepest + 1):
        cut = [
            candidate._replace(
                curve=type(candidate.curve)(
                    [2.0] * len(candidate.curve.survival[:k]), candidate.curve.drafted[:k]
                )
            )
            for candidate in candidates
        ]
        whole = best_chains(cut, times, max_nodes)
        if sum(whole.depths) != sum(len(c.curve.survival) for c in cut):
            continue
        accepted = sum(sum(candidate.curve.survival[:k]) for candidate in candidates)
        found.append(whole._replace(tokens=len(candidates) + accepted))
    return max(found, key=lambda allocation: allocation.tokens_per_s)


def ignore(self: Any, *inputs: Any, **named: Any) -> None:
    """Do nothing; a decision that returns nothing means "none"."""


NO_PROBES = [(goodput.GoodputController, "_probe", ignore)]
NO_PLAIN_STEPS = [(goodput.GoodputController, "_plain_run", 0)]
VARIANTS: Mapping[str, tuple[list[tuple[Any, str, Any]], Make]] = {
    "auto": ([], auto()),
    "without a profile": ([], without_profile),
    "no probes": (NO_PROBES, auto()),
    "no plain steps while drafting": (NO_PLAIN_STEPS, auto()),
    "no plain steps, without a profile": (NO_PLAIN_STEPS, without_profile),
    "no acceptance of its own per request": ([], auto(similar_strength=1e9)),
    "one K for the batch": ([(goodput, "best_chains", uniform)], auto()),
    "no correction of costs": ([(CostModel, "observe", ignore)], auto()),
    "no trees": ([(goodput.GoodputController, "_best_tree", ignore)], auto()),
    "no plan reuse": ([], auto(reuse=1)),
}
