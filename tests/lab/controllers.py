"""Controllers that choose K badly."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.control.base import Capacity, Controller, Decision, Plan, RequestState
from forerun.theory.record import StepRecord

__all__ = ["Oscillating", "Pausing"]


class Oscillating(Controller):
    """Swings between two K, whatever is accepted.

    Args:
        method: of the drafter.
        low: smaller K.
        high: larger K.
        period: steps at each.
    """

    def __init__(self, method: str, low: int, high: int, period: int) -> None:
        self.method = method
        self.low = low
        self.high = high
        self.period = period
        self._num_steps: dict[str, int] = {}

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> Decision:
        """The K of the half period a request is in."""
        plans = []
        for state in states:
            steps = self._num_steps.get(state.request_id, 0)
            self._num_steps[state.request_id] = steps + 1
            k = self.high if steps // self.period % 2 else self.low
            plans.append(Plan.chain(self.method, k) if k else Plan())
        return Decision(plans)

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Learn nothing."""


class Pausing(Controller):
    """A fixed K with a plain step now and then.

    Args:
        method: of the drafter.
        k: tokens drafted otherwise.
        every: steps from one pause to the next.
    """

    def __init__(self, method: str, k: int, every: int) -> None:
        self.plan = Plan.chain(method, k)
        self.every = every
        self._num_steps: dict[str, int] = {}

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> Decision:
        """The plan, or none."""
        plans = []
        for state in states:
            steps = self._num_steps[state.request_id] = self._num_steps.get(state.request_id, 0) + 1
            plans.append(Plan() if steps % self.every == 0 else self.plan)
        return Decision(plans)

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Learn nothing."""
