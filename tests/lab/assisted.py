"""A baseline controller: the rule for K in transformers' assisted generation."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.control.acceptance import make_room
from forerun.control.base import Capacity, Controller, Decision, Plan, RequestState
from forerun.theory.record import StepRecord


class HeuristicController(Controller):
    """Raises K by 2 if all draft tokens were accepted and lowers it by 1 otherwise; at least 1.

    Source: `num_assistant_tokens_schedule="heuristic"` of transformers.

    Args:
        method: name of the drafter.
        max_k: largest K.
        start_k: K of a request's first step.
    """

    def __init__(self, method: str, max_k: int, start_k: int = 5) -> None:
        self.method = method
        self.max_k = max_k
        self.start_k = min(start_k, max_k)
        self._ks: dict[str, int] = {}

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> Decision:
        """Return every request's K as a plan, cut if a pass has too few rows for all requests."""
        share = capacity.nodes_each(len(states))
        return Decision(
            [
                plan_of(self.method, min(share, self._ks.get(state.request_id, self.start_k)))
                for state in states
            ]
        )

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Update K of the requests whose planned tokens were drafted."""
        for record in records:
            if record.k_budget == 0:
                continue
            k = self._ks.pop(record.request_id, self.start_k)
            all_accepted = record.num_accepted == record.k_budget
            make_room(self._ks)
            self._ks[record.request_id] = max(1, min(self.max_k, k + 2 if all_accepted else k - 1))


def plan_of(method: str, k: int) -> Plan:
    """Return a plan of K tokens of a drafter, or plain decoding where K is 0 or less."""
    return Plan.chain(method, k) if k > 0 else Plan()
