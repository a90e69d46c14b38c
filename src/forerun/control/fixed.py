"""Controller that plans the same shape for every request at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forerun.control.base import Capacity, Chain, Plan, RequestState, Tree
from forerun.theory.record import StepRecord


class FixedController:
    """Plans one drafter and shape; it cuts the shape only if a pass has too few rows for all.

    Args:
        shape: K of a chain, or a tree.
    """

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

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Ignore the records: a fixed controller estimates nothing."""
