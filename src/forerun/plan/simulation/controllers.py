"""Controllers by name, as the engine builds them, with `fixed:K` and `plain` besides."""

from __future__ import annotations

from collections.abc import Callable

from forerun.control.base import Controller
from forerun.control.config import CONTROLLER_NAMES
from forerun.control.named import ControllerInputs, build_controller
from forerun.errors import InvalidRequest
from forerun.plan.costs import DraftCosts

__all__ = ["METHOD", "controller_maker"]

METHOD = "draft_model"
"""Name of the simulated drafter."""


def controller_maker(name: str, costs: DraftCosts, max_k: int) -> Callable[[], Controller]:
    """Return a function that builds a controller without estimates, as each run needs one.

    Args:
        name: "plain", "fixed:K", or a name of `forerun.control`.
        costs: costs of cycles that it receives.
        max_k: largest K.

    Raises:
        InvalidRequest: there is no controller of that name, or its K is out of range.
    """
    base, colon, argument = name.partition(":")
    base, argument = ("fixed", "0") if name == "plain" else (base, argument)
    kind = next((known for known in CONTROLLER_NAMES if known == base), None)
    if kind is None:
        raise InvalidRequest(
            f"controller {name!r} is unknown; use plain, fixed:K, {', '.join(CONTROLLER_NAMES)}"
        )
    k = max_k
    if argument or colon:
        if kind != "fixed" or not argument.isdecimal() or int(argument) > max_k:
            raise InvalidRequest(
                f"controller {name!r}: only fixed takes a K, from 0 to max_k, which is {max_k}"
            )
        k = int(argument)
    means = ControllerInputs(methods=(METHOD,), num_speculative_tokens=k, costs={METHOD: costs})
    return lambda: build_controller(kind, means)
