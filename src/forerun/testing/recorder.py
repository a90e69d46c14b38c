"""Drafter wrapper that records proposals for the conformance suite."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from forerun.control.base import Capacity, Plan, RequestState, Tree
from forerun.drafters.base import Drafter, DraftRequest, Pause, StepOutcome, TopTokensDrafter
from forerun.sampling.proposal import Proposal
from forerun.theory.record import StepRecord

__all__ = ["TREE", "Failures", "Recorder", "TreePlans"]

TREE = Tree(num_nodes=6, depth=3, width=3)


class Recorder:
    """Forwards all calls to a drafter, and records its proposals and any changed inputs.

    Args:
        inner: the drafter under test.
        fails_at: number of the call of `propose` that raises after the drafter has answered; the
            engine then drops the drafter's state and reports all rows again.
    """

    def __init__(self, inner: Drafter, fails_at: int | None = None) -> None:
        self.inner = inner
        self.method = inner.method
        self.required_features = inner.required_features
        self.required_top_k = inner.required_top_k if isinstance(inner, TopTokensDrafter) else 0
        self.fails_at = fails_at
        self.num_calls = 0
        self.proposals: dict[tuple[str, int], Proposal] = {}
        self.problems: list[str] = []

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> Sequence[Proposal | Pause | None]:
        """Forward to the drafter, and record its proposals by request and committed length."""
        before = [list(request.ids) for request in requests]
        answers = self.inner.propose(requests, plans)
        self.num_calls += 1
        for request, ids in zip(requests, before, strict=True):
            if request.ids != ids:
                self.problems.append(
                    f"propose changed the ids of request {request.request_id}; they belong to the "
                    "engine: copy them"
                )
        if self.num_calls == self.fails_at:
            raise PlannedFailure
        for request, answer in zip(requests, answers, strict=False):
            if isinstance(answer, Proposal) and answer.num_drafted:
                self.proposals[request.request_id, len(request.ids)] = answer
        return answers

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Forward the outcomes to the drafter."""
        self.inner.observe(outcomes)

    def forget(self, request_id: str) -> None:
        """Forward the end of a request to the drafter."""
        self.inner.forget(request_id)


class PlannedFailure(Exception):
    """Raised by the conformance suite to make the engine drop a drafter's state."""


class TreePlans:
    """Controller that plans the same tree for every request."""

    def __init__(self, method: str) -> None:
        self.plan = Plan(method=method, shape=TREE)

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> list[Plan]:
        """Return the same tree plan for all requests."""
        return [self.plan] * len(states)

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Ignore the outcomes."""


class Failures(logging.Handler):
    """Collects the messages by which the engine reports a drafter's failures."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Store the message, unless it reports a planned failure."""
        if PlannedFailure.__name__ not in repr(record.args) and not any(
            isinstance(argument, PlannedFailure) for argument in record.args or ()
        ):
            self.messages.append(record.getMessage())
