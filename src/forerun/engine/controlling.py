"""The controller that an engine uses where the caller passes none."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.control.base import Controller
from forerun.control.fixed import FixedController
from forerun.control.named import ControllerInputs, build_controller
from forerun.control.step_times import CostSource
from forerun.drafters.base import Drafter
from forerun.drafters.several import SeveralDrafters
from forerun.engine.config import EngineConfig

__all__ = ["default_controller"]


def default_controller(
    config: EngineConfig, drafter: Drafter | None, costs: Mapping[str, CostSource]
) -> Controller:
    """Build the controller that the settings name; without a drafter it always decodes plainly.

    Args:
        config: of the engine.
        drafter: one, or several to choose from.
        costs: by the drafters' methods, where they are known.

    Raises:
        InvalidRequest: it needs costs that are not given.
    """
    k = config.num_speculative_tokens
    if drafter is None or k == 0:
        return FixedController(0)
    methods = tuple(drafter.drafters) if isinstance(drafter, SeveralDrafters) else (drafter.method,)
    means = ControllerInputs(methods=methods, num_speculative_tokens=k, costs=costs)
    return build_controller(config.controller, means)
