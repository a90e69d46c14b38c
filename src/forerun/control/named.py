"""The controller `fixed`, and the check of controllers that callers bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forerun.control.base import (
    Capacity,
    Chain,
    Controller,
    Decision,
    Plan,
    RequestState,
    Tree,
)
from forerun.control.config import CONTROLLER_NAMES
from forerun.errors import InvalidRequest

UNLIMITED = 1 << 31
"""More steps than a text has tokens."""


class FixedController(Controller):
    """Plans one drafter and shape; it cuts the shape only if a pass has too few rows for all."""

    is_observed = False

    def __init__(self, shape: int | Tree, method: str = "draft_model") -> None:
        self.shape = Chain(num_tokens=shape) if isinstance(shape, int) else shape
        self.method = method

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> Decision:
        """Return the same plan for every request; the engine applies request limits."""
        num_nodes = max(0, min(self.shape.num_nodes, capacity.nodes_each(len(states))))
        plan = Plan()
        if num_nodes and isinstance(self.shape, Tree):
            plan = Plan(method=self.method, shape=replace(self.shape, num_nodes=num_nodes))
        elif num_nodes:
            plan = Plan.chain(self.method, num_nodes)
        return Decision([plan] * len(states), UNLIMITED, self.is_observed)


def check_controller(controller: object) -> None:
    """Refuse an object that is not a controller; None is allowed."""
    if controller is None:
        return
    if isinstance(controller, str):
        raise InvalidRequest(
            f"controller is the text {controller!r:.60}, but must be an object; to choose one by "
            "its name, use config=EngineConfig(controller=NAME) with a name of "
            f"{', '.join(CONTROLLER_NAMES)}"
        )
    if isinstance(controller, type):
        name = controller.__name__
        raise InvalidRequest(f"controller is the class {name}; pass an object of it")
    if not isinstance(controller, Controller):
        raise InvalidRequest(
            f"controller is an object of type {type(controller).__name__}, which is no subclass of "
            "Controller (docs/control.md)"
        )
