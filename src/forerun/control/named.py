"""Controllers by name: `auto`, and `fixed`, which plans one drafter and shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from forerun.control.base import Capacity, Chain, Controller, Plan, RequestState, Tree
from forerun.control.config import CONTROLLER_NAMES, ControllerName, check_name
from forerun.control.costs import CostSource, DrafterTraits
from forerun.control.goodput import GoodputController
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerInputs:
    """The settings, drafters and costs that a controller is built from.

    Attributes:
        num_speculative_tokens: largest K, and the most levels of a tree.
        max_tree_nodes: most nodes of a tree; the largest K where that is more.
        traits: properties of the drafters, by method.
    """

    methods: Sequence[str]
    num_speculative_tokens: int
    costs: Mapping[str, CostSource] = field(default_factory=dict)
    tree_methods: Sequence[str] = ()
    max_tree_nodes: int = 0
    traits: Mapping[str, DrafterTraits] = field(default_factory=dict)


def build_controller(name: ControllerName, inputs: ControllerInputs) -> Controller:
    """Build the controller with the given name."""
    check_name(name)
    if name == "fixed":
        return FixedController(inputs.num_speculative_tokens, inputs.methods[0])
    return GoodputController(
        {method: inputs.costs.get(method) for method in inputs.methods},
        inputs.num_speculative_tokens,
        tree_methods=inputs.tree_methods,
        max_tree_nodes=inputs.max_tree_nodes,
        traits=inputs.traits,
    )


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
