"""Controllers by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from forerun.control.bandit import BanditController
from forerun.control.base import Controller
from forerun.control.config import ControllerName
from forerun.control.fixed import FixedController
from forerun.control.goodput import GoodputController
from forerun.control.heuristic import ConfidenceController, HeuristicController
from forerun.control.safety import SafeController
from forerun.control.step_times import CostSource
from forerun.errors import InvalidRequest

__all__ = ["CONTROLLERS", "ControllerInputs", "build_controller"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerInputs:
    """What a controller has to work with.

    Attributes:
        methods: names of the drafters there are, at least one.
        num_speculative_tokens: largest K.
        costs: cost tables by method, where they were measured.
    """

    methods: Sequence[str]
    num_speculative_tokens: int
    costs: Mapping[str, CostSource] = field(default_factory=dict)


def auto(means: ControllerInputs) -> Controller:
    """The safe goodput controller where costs are known, else K at every step."""
    return SafeController(goodput(means)) if means.costs else fixed(means)


def fixed(means: ControllerInputs) -> Controller:
    """K of the first drafter at every step."""
    return FixedController(means.num_speculative_tokens, means.methods[0])


def heuristic(means: ControllerInputs) -> Controller:
    """K grows by 2 and shrinks by 1, as in transformers."""
    return HeuristicController(means.methods[0], means.num_speculative_tokens)


def confidence(means: ControllerInputs) -> Controller:
    """K, left where the draft is unsure, as in transformers."""
    return ConfidenceController(means.methods[0], means.num_speculative_tokens)


def goodput(means: ControllerInputs) -> Controller:
    """Most expected tokens per second.

    Raises:
        InvalidRequest: the costs of a drafter are not known.
    """
    missing = [method for method in means.methods if method not in means.costs]
    if missing:
        raise InvalidRequest(
            f"the goodput controller needs to know what {' and '.join(missing)} costs: give a "
            "profile (forerun profile makes one), or take another controller"
        )
    costs = {method: means.costs[method] for method in means.methods}
    return GoodputController(costs, means.num_speculative_tokens)


def bandit(means: ControllerInputs) -> Controller:
    """A bandit over K and drafters."""
    return BanditController(means.methods, means.num_speculative_tokens)


CONTROLLERS: Mapping[ControllerName, Callable[[ControllerInputs], Controller]] = MappingProxyType(
    {
        "auto": auto,
        "fixed": fixed,
        "heuristic": heuristic,
        "confidence": confidence,
        "goodput": goodput,
        "bandit": bandit,
    }
)


def build_controller(name: ControllerName, means: ControllerInputs) -> Controller:
    """The controller of a name.

    Raises:
        InvalidRequest: there is none of that name, or it lacks what it needs.
    """
    if name not in CONTROLLERS:
        raise InvalidRequest(f"controller {name!r} is unknown; use {', '.join(CONTROLLERS)}")
    return CONTROLLERS[name](means)
