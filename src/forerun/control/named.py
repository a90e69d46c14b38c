"""The controller `fixed`, and the check of controllers that callers bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forerun.control.base import Capacity, Chain, Controller, Plan, RequestState, Tree
from forerun.control.config import CONTROLLER_NAMES
from forerun.errors import InvalidRequest


class FixedController(Controller):
    """Plans one drafter and shape; it cuts the shape only if a pass has too few rows for all."""

    def __init__(self, shape: int | Tree, method: str = "draft_model") -> None:
        self.shape = Chain(num_tokens=shape) if isinstance(shape, int) else shape
        self.method = method

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> list[Plan]:
        """Return the same plan for every request; the engine applies request limits."""
        num_nodes = max(0, min(self.shape.num_nodes, capacity.nodes_each(len(states))))
        if num_nodes == 0:
            return [Plan()] * len(states)
        if isinstance(self.shape, Chain):
            return [Plan.chain(self.method, num_nodes)] * len(states)
        cut = num_nodes < self.shape.num_nodes
        shape = replace(self.shape, num_nodes=num_nodes) if cut else self.shape
        return [Plan(method=self.method, shape=shape)] * len(states)

    def num_held(self) -> int:
        """Return more steps than a text has tokens."""
        return 1 << 31


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
