"""Two baseline controllers: the rules for K in transformers' assisted generation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from forerun.control.acceptance import make_room
from forerun.control.base import Capacity, Plan, RequestState
from forerun.theory.record import StepRecord
from forerun.theory.stop_rule import StopRule


class HeuristicController:
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

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> list[Plan]:
        """Return every request's K as a plan, cut if a pass has too few rows for all requests."""
        share = capacity.nodes_each(len(states))
        return [
            plan_of(self.method, min(share, self._ks.get(state.request_id, self.start_k)))
            for state in states
        ]

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Update K of the requests whose planned tokens were drafted."""
        for record in records:
            if record.k_budget == 0:
                continue
            k = self._ks.pop(record.request_id, self.start_k)
            all_accepted = record.num_accepted == record.k_budget
            make_room(self._ks)
            self._ks[record.request_id] = max(1, min(self.max_k, k + 2 if all_accepted else k - 1))


class ConfidenceController:
    """Plans a large K with a stop rule whose confidence threshold is estimated from outcomes.

    The threshold minimises the rate of drafted tokens that are wrong plus three times the rate of
    right ones not drafted, over the tokens seen so far.

    Source: `assistant_confidence_threshold` of transformers, which looks at the probability of the
    token just drawn. Here it is the top probability before the draw, so that no drawn token can end
    its own draft.

    Args:
        method: name of the drafter.
        max_k: K.
        threshold: on the top probability until enough is known.
    """

    def __init__(self, method: str, max_k: int, threshold: float = 0.4) -> None:
        self.method = method
        self.max_k = max_k
        self.threshold = threshold
        self._seen: list[tuple[float, bool]] = []

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> list[Plan]:
        """Return the same plan for every request."""
        share = capacity.nodes_each(len(states))
        rule = StopRule(measure="top_probability", threshold=self.threshold)
        return [plan_of(self.method, min(share, self.max_k), rule)] * len(states)

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Update the threshold from draft tokens whose predecessors were all accepted."""
        for record in records:
            reached = (record.stop_values or ())[: record.num_accepted + 1]
            self._seen += [(value, n < record.num_accepted) for n, value in enumerate(reached)]
        del self._seen[:-1024]
        num_right = sum(right for _, right in self._seen)
        if len(self._seen) > 5 and 0 < num_right < len(self._seen):
            self.threshold = best_threshold(self._seen)


def best_threshold(seen: Sequence[tuple[float, bool]]) -> float:
    """Return the confidence threshold that best separates accepted from rejected tokens."""
    ranked = sorted(seen, reverse=True)
    right = list(accumulate(hit for _, hit in ranked))
    num_right, num_wrong = right[-1], len(ranked) - right[-1]
    best_cost, best = 3.0, 1.0  # nothing is drafted
    for at, (value, _) in enumerate(ranked):
        if at + 1 < len(ranked) and ranked[at + 1][0] == value:
            continue  # tokens of one confidence are drafted together
        wrong_share = (at + 1 - right[at]) / num_wrong
        cost = wrong_share + 3.0 * (1.0 - right[at] / num_right)
        if cost < best_cost:
            best_cost, best = cost, value
    return best


def plan_of(method: str, k: int, stop: StopRule | None = None) -> Plan:
    """Return a plan of K tokens of a drafter, or plain decoding where K is 0 or less."""
    return Plan.chain(method, k, stop=stop) if k > 0 else Plan()
