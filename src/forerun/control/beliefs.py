"""Estimates of how many draft tokens are accepted, per request and for similar requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from forerun.control.base import RequestState
from forerun.control.config import MAX_POOLS, BeliefConfig
from forerun.theory.posterior import Prospects
from forerun.theory.record import StepRecord

__all__ = ["AcceptanceCurve", "Beliefs", "DraftVariant", "RequestClass"]


class DraftVariant(NamedTuple):
    """A drafter with or without a stop rule; acceptance is estimated separately for each.

    Attributes:
        method: name of the drafter.
        stops: whether a stop rule may end the draft.
    """

    method: str
    stops: bool


class AcceptanceCurve(NamedTuple):
    """Probabilities that a draft reaches and passes positions 1, 2, ...

    Attributes:
        survival: P(accepted through i).
        drafted: P(drafted through i), below 1 where a stop rule or the drafter may end it before.
    """

    survival: list[float]
    drafted: list[float]


RequestClass = tuple[tuple[str, ...], float]
"""Requests that are taken to be alike: by their tags and temperature."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestBelief:
    """Acceptance estimates of one request.

    Attributes:
        kind: which requests it is like.
        num_read: its tokens when it drafted last.
        ways: what its own drafts have shown.
    """

    kind: RequestClass
    num_read: int = 0
    ways: dict[DraftVariant, Prospects] = field(default_factory=dict)


class Beliefs:
    """Discounted posteriors per request, whose priors come from similar requests.

    Args:
        config: how things are learnt.
    """

    def __init__(self, config: BeliefConfig) -> None:
        self.config = config
        self._requests: dict[str, RequestBelief] = {}
        self._pools: dict[tuple[RequestClass, DraftVariant], Prospects] = {}

    def curve(self, state: RequestState, way: DraftVariant, num_positions: int) -> AcceptanceCurve:
        """Return the expected acceptance curve of a request's next draft."""
        config = self.config
        request = self._request(state)
        pool, own = self._pool(request.kind, way), self._own(request, way)
        accepted = pool.accepted.means(config.prior, num_positions)
        survival = list(accumulate(own.accepted.means_given(accepted), mul))
        if not pool.drafted.rates:
            return AcceptanceCurve(survival, [1.0] * num_positions)
        drafted = own.drafted.means_given(pool.drafted.means(1.0, num_positions))
        return AcceptanceCurve(survival, list(accumulate(drafted, mul)))

    def has_seen(self, state: RequestState, way: DraftVariant) -> bool:
        """Return whether a request of its tags and temperature has drafted so."""
        return bool(self._pool(self._request(state).kind, way).accepted.rates)

    def num_unread(self, state: RequestState) -> int:
        """Return the tokens since the request drafted last."""
        return state.num_committed - self._request(state).num_read

    def observe(self, record: StepRecord, way: DraftVariant) -> None:
        """Learn from a step in which a request was allowed to draft."""
        request = self._requests.get(record.request_id)
        if request is None:
            return
        request.num_read = record.context_tokens + record.num_emitted
        own, pool = self._own(request, way), self._pool(request.kind, way)
        for prospects in (own, pool):
            prospects.observe(record.k_budget, record.depth_drafted, record.num_accepted)

    def _request(self, state: RequestState) -> RequestBelief:
        request = self._requests.get(state.request_id)
        if request is None:
            kind = state.tags, round(state.temperature, 1)
            request = RequestBelief(kind=kind)
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
            if len(self._pools) >= MAX_POOLS:
                del self._pools[next(iter(self._pools))]
            pool = self._pools[kind, way] = Prospects(self.config.pool, self.config.strength)
        return pool
