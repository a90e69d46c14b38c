"""Estimates of draft acceptance, per request and pooled over similar requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

from forerun.control.base import RequestState, Tree
from forerun.control.config import LATER_RANK, MAX_POOLS, BeliefConfig
from forerun.theory.budget import tree_survival
from forerun.theory.posterior import Passing, Prospects
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
    """Probabilities that a draft extends to, and is accepted through, each position.

    Attributes:
        survival: P(accepted through i).
        drafted: P(drafted through i), below 1 where a stop rule or the drafter may end it before.
    """

    survival: list[float]
    drafted: list[float]


class Siblings:
    """Estimated acceptance of later siblings in trees, after the first child was rejected.

    Args:
        config: how things are learnt.
    """

    def __init__(self, config: BeliefConfig) -> None:
        self.missed = Passing(config.pool, config.strength)

    def observe(self, record: StepRecord) -> None:
        """Update the estimates from a step with a tree."""
        ranks, children = record.path_ranks or (), record.path_children or ()
        for at, num_children in enumerate(children):
            rank = ranks[at] if at < len(ranks) else num_children + 1
            if rank > 1 and num_children > 1:
                self.missed.observe(num_children - 1, rank - 2)

    def later(self, width: int) -> list[float]:
        """Return P(accepted given that earlier siblings are not) for ranks 2 to `width`."""
        return [1.0 - miss for miss in self.missed.means(1.0 - LATER_RANK, width - 1)]


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
    """Discounted acceptance posteriors per request, with priors from similar requests.

    Args:
        config: how things are learnt.
    """

    def __init__(self, config: BeliefConfig) -> None:
        self.config = config
        self._requests: dict[str, RequestBelief] = {}
        self._pools: dict[tuple[RequestClass, DraftVariant], Prospects] = {}
        self._siblings: dict[tuple[RequestClass, str], Siblings] = {}

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

    def tree_survival(
        self, state: RequestState, curve: AcceptanceCurve, method: str, shape: Tree
    ) -> list[float]:
        """Return P(accepted) of every node of the best tree within a shape, the best node first.

        Args:
            state: of the request.
            curve: what chains of the same drafter are expected to do, as deep as the shape.
            method: the drafter.
            shape: the most nodes, levels and children of a node.
        """
        siblings = self._siblings_of(self._request(state).kind, method)
        survival = curve.survival
        first = [b / a if a else 0.0 for a, b in pairwise((1.0, *survival[: shape.depth]))]
        later = siblings.later(shape.width)
        return tree_survival(first, later, depth=shape.depth, num_nodes=shape.num_nodes)

    def has_seen(self, state: RequestState, way: DraftVariant) -> bool:
        """Return whether any request with the same tags and temperature used this drafter."""
        return bool(self._pool(self._request(state).kind, way).accepted.rates)

    def num_unread(self, state: RequestState) -> int:
        """Return the number of tokens committed since the last draft of the request."""
        return state.num_committed - self._request(state).num_read

    def observe(self, record: StepRecord, way: DraftVariant) -> None:
        """Update the estimates from a step in which a request was allowed to draft."""
        request = self._requests.get(record.request_id)
        if request is None:
            return
        request.num_read = record.context_tokens + record.num_emitted
        own, pool = self._own(request, way), self._pool(request.kind, way)
        if record.path_children is None:
            for prospects in (own, pool):
                prospects.observe(record.k_budget, record.depth_drafted, record.num_accepted)
            return
        self._siblings_of(request.kind, way.method).observe(record)
        num_passed, num_allowed = first_children(record.path_ranks or (), record.path_children)
        for prospects in (own, pool):
            prospects.accepted.observe(num_allowed, num_passed)

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

    def _siblings_of(self, kind: RequestClass, method: str) -> Siblings:
        found = self._siblings.get((kind, method))
        if found is None:
            if len(self._siblings) >= MAX_POOLS:
                del self._siblings[next(iter(self._siblings))]
            found = self._siblings[kind, method] = Siblings(self.config)
        return found


def first_children(ranks: Sequence[int], children: Sequence[int]) -> tuple[int, int]:
    """Return how many first children on a path were accepted, and how many were drafted.

    Args:
        ranks: of the accepted nodes among their siblings, from 1 on.
        children: numbers of children at the last committed token and at each accepted node.
    """
    num_passed = next((at for at, rank in enumerate(ranks) if rank > 1), len(ranks))
    return num_passed, num_passed + (children[num_passed] > 0)
