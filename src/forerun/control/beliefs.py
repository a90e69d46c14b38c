"""What is believed of every request's drafts: its own steps, and those of requests like it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from forerun.control.base import RequestState
from forerun.control.config import BeliefConfig
from forerun.theory.posterior import Prospects
from forerun.theory.record import StepRecord

__all__ = ["AcceptanceCurve", "Beliefs", "DraftVariant", "RequestClass", "UnreadText"]


class DraftVariant(NamedTuple):
    """A way to draft: what is learnt of one says nothing about another.

    Attributes:
        method: name of the drafter.
        stops: whether a stop rule may end the draft.
    """

    method: str
    stops: bool


class AcceptanceCurve(NamedTuple):
    """What drafting deeper brings and costs, for positions 1, 2, ...

    Attributes:
        survival: P(accepted through i).
        drafted: P(drafted through i), below 1 where a stop rule or the drafter may end it before.
    """

    survival: list[float]
    drafted: list[float]


RequestClass = tuple[tuple[str, ...], float]
"""Requests that are taken to be alike: by their tags and temperature."""


class UnreadText(NamedTuple):
    """How much of a request there is to learn from.

    Attributes:
        kind: which requests it is like.
        tokens: of its output.
        missed: tokens that a draft has to catch up with.
    """

    kind: RequestClass
    tokens: int
    missed: int


@dataclass(slots=True, kw_only=True, eq=False)
class RequestBelief:
    """One request as it is remembered.

    Attributes:
        kind: which requests it is like.
        num_begun: its tokens when it was first asked about.
        num_read: its tokens when it drafted last.
        ways: what its own drafts have shown.
    """

    kind: RequestClass
    num_begun: int = 0
    num_read: int = 0
    ways: dict[DraftVariant, Prospects] = field(default_factory=dict)


class Beliefs:
    """Discounted posteriors per request, which begin with those of their kind.

    Args:
        config: how things are learnt.
    """

    def __init__(self, config: BeliefConfig) -> None:
        self.config = config
        self._requests: dict[str, RequestBelief] = {}
        self._pools: dict[tuple[RequestClass, DraftVariant], Prospects] = {}

    def curve(self, state: RequestState, way: DraftVariant, num_positions: int) -> AcceptanceCurve:
        """What is expected of a request's next draft."""
        config = self.config
        request = self._request(state)
        pool, own = self._pool(request.kind, way), self._own(request, way)
        accepted = pool.accepted.means(config.prior, num_positions)
        survival = list(accumulate(own.accepted.means_given(accepted), mul))
        if not pool.drafted.rates:
            return AcceptanceCurve(survival, [1.0] * num_positions)
        drafted = own.drafted.means_given(pool.drafted.means(1.0, num_positions))
        return AcceptanceCurve(survival, list(accumulate(drafted, mul)))

    def news(self, state: RequestState) -> UnreadText:
        """Tokens since the request was first asked about, and since it drafted last."""
        request, num_ids = self._request(state), state.num_committed
        return UnreadText(request.kind, num_ids - request.num_begun, num_ids - request.num_read)

    def observe(self, record: StepRecord, way: DraftVariant) -> None:
        """Learn from a step in which a request was allowed to draft."""
        request = self._requests.get(record.request_id)
        if request is None:
            return
        request.num_read = record.context_tokens + record.num_emitted
        own, pool = self._own(request, way), self._pool(request.kind, way)
        for prospects in (own, pool):
            for foreseen in record.hindsight or ():
                prospects.observe(1, 1, foreseen)
            prospects.observe(record.k_budget, record.depth_drafted, record.num_accepted)

    def fade(self, records: Sequence[StepRecord], way: DraftVariant, share: float) -> None:
        """Believe less firmly what was learnt of these requests, and of those they are like.

        Args:
            records: of the requests.
            way: it was learnt of.
            share: of its weight that is left.
        """
        requests = [self._requests.get(record.request_id) for record in records]
        known = [request for request in requests if request is not None]
        for request in known:
            self._own(request, way).fade(share)
        for kind in {request.kind for request in known}:
            self._pool(kind, way).fade(share)

    def _request(self, state: RequestState) -> RequestBelief:
        request = self._requests.get(state.request_id)
        if request is None:
            kind = state.tags, round(state.temperature, 1)
            request = RequestBelief(kind=kind, num_begun=state.num_committed)
            self._requests[state.request_id] = request
            if len(self._requests) > self.config.most_requests:
                del self._requests[next(iter(self._requests))]
        return request

    def _own(self, request: RequestBelief, way: DraftVariant) -> Prospects:
        own = request.ways.get(way)
        if own is None:
            own = request.ways[way] = Prospects(self.config.request, self.config.strength)
        return own

    def _pool(self, kind: RequestClass, way: DraftVariant) -> Prospects:
        pool = self._pools.get((kind, way))
        if pool is None:
            pool = self._pools[kind, way] = Prospects(self.config.pool, self.config.strength)
        return pool
