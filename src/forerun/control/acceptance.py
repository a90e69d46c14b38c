"""Estimates of draft acceptance by position, per request and pooled over similar requests.

A position is observed where everything before it was accepted and the plan allowed it. Where a
drafter ended its draft early, the next position was allowed and not passed, so the estimate at K is
that of drafts that may end early.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import Any, NamedTuple

from forerun.control.base import RequestState, Tree
from forerun.control.config import GoodputConfig
from forerun.theory.record import StepRecord
from forerun.theory.tree import tree_survival

MAX_REMEMBERED = 4096
"""Requests and groups of similar requests that are remembered; a bound on memory alone."""


class AcceptanceCurve(NamedTuple):
    """Probabilities that a draft extends to, and is accepted through, each position.

    Attributes:
        survival: P(accepted through i).
        drafted: P(drafted through i), below 1 where the drafter may end the draft before.
    """

    survival: list[float]
    drafted: list[float]


class Positions:
    """Estimates P(position i passed given that i - 1 is passed and i allowed), for every i."""

    __slots__ = ("config", "trials", "wins")

    def __init__(self, config: GoodputConfig) -> None:
        self.config = config
        self.trials: list[float] = []
        self.wins: list[float] = []

    def observe(self, num_allowed: int, num_passed: int) -> None:
        memory, trials, wins = self.config.memory, self.trials, self.wins
        num_reached = min(num_allowed, num_passed + 1)
        if (missing := num_reached - len(trials)) > 0:
            trials += [0.0] * missing
            wins += [0.0] * missing
        for index in range(num_reached):
            trials[index] = trials[index] * memory + 1.0
            wins[index] = wins[index] * memory + (index < num_passed)

    def means(self, prior: float, num_positions: int) -> list[float]:
        """Return posterior means; a position without trials has the mean of the one before it."""
        found: list[float] = []
        strength = self.config.strength
        for trials, wins in zip(self.trials[:num_positions], self.wins, strict=False):
            prior = (wins + prior * strength) / (trials + strength)
            found.append(prior)
        return found + [prior] * (num_positions - len(found))

    def means_given(self, priors: Sequence[float]) -> list[float]:
        strength = self.config.similar_strength
        found = [
            (wins + prior * strength) / (trials + strength)
            for trials, wins, prior in zip(self.trials, self.wins, priors, strict=False)
        ]
        return [*found, *priors[len(found) :]]


class DraftHistory:
    """Outcomes of the drafts of one drafter.

    Attributes:
        accepted: of chains, and of the first children on paths of trees.
        drafted: positions that the drafter filled; empty while it always filled all.
        missed: later children of trees that were not accepted, given that earlier ones were not.
    """

    __slots__ = ("accepted", "drafted", "missed")

    def __init__(self, config: GoodputConfig) -> None:
        self.accepted = Positions(config)
        self.drafted = Positions(config)
        self.missed = Positions(config)

    def observe(self, record: StepRecord) -> None:
        """Update the estimates from one step in which a request was allowed to draft."""
        children = record.path_children
        if children is None:
            self.accepted.observe(record.k_budget, record.num_accepted)
            if record.depth_drafted < record.k_budget or self.drafted.trials:
                self.drafted.observe(record.k_budget, record.depth_drafted)
            return
        ranks = record.path_ranks or ()
        num_passed, num_allowed = first_children(ranks, children)
        self.accepted.observe(num_allowed, num_passed)
        for at, num_children in enumerate(children):
            rank = ranks[at] if at < len(ranks) else num_children + 1
            if rank > 1 and num_children > 1:
                self.missed.observe(num_children - 1, rank - 2)


RequestClass = tuple[tuple[str, ...], float]
"""Requests that are expected to be similar: by their tags and temperature."""


class RequestHistory:
    """Outcomes of one request's drafts, and those of similar requests, by drafting method."""

    __slots__ = ("drafts", "kind", "num_before", "num_read")

    def __init__(self, kind: RequestClass, num_before: int) -> None:
        self.kind = kind
        self.num_before = num_before
        self.num_read: dict[str, int] = {}
        self.drafts: dict[str, tuple[DraftHistory, DraftHistory]] = {}


class AcceptanceEstimates:
    """Discounted acceptance posteriors per request, with priors from similar requests."""

    def __init__(self, config: GoodputConfig) -> None:
        self.config = config
        self._requests: dict[str, RequestHistory] = {}
        self._pools: dict[tuple[RequestClass, str], DraftHistory] = {}
        self._means: dict[tuple[DraftHistory, int], list[float]] = {}  # until the next outcome
        self._num_ended, self._output_tokens = 1.0, config.assumed_output

    def curve(self, state: RequestState, method: str, num_positions: int) -> AcceptanceCurve:
        """Return the expected acceptance curve of a request's next draft."""
        own, pool = self._drafts(self._request(state), method)
        accepted = self._means.get((pool, num_positions))
        if accepted is None:
            accepted = pool.accepted.means(self.config.prior, num_positions)
            self._means[pool, num_positions] = accepted
        survival = list(accumulate(own.accepted.means_given(accepted), mul))
        if not pool.drafted.trials:
            return AcceptanceCurve(survival, [1.0] * num_positions)
        drafted = own.drafted.means_given(pool.drafted.means(1.0, num_positions))
        return AcceptanceCurve(survival, list(accumulate(drafted, mul)))

    def tree_survival(
        self, state: RequestState, curve: AcceptanceCurve, method: str, shape: Tree
    ) -> list[float]:
        """Return P(accepted) of every node of the best tree within a shape, the best node first."""
        (_, pool), survival = self._drafts(self._request(state), method), curve.survival
        first = [b / a if a else 0.0 for a, b in pairwise((1.0, *survival[: shape.depth]))]
        later = [1.0 - miss for miss in pool.missed.means(self.config.prior, shape.width - 1)]
        return tree_survival(first, later, depth=shape.depth, num_nodes=shape.num_nodes)

    def num_unread(self, state: RequestState, method: str) -> int:
        """Return the tokens of a request that were committed since the last draft of a method."""
        return state.num_committed - self._request(state).num_read.get(method, 0)

    def num_tried(self, state: RequestState, method: str) -> float:
        """Return the discounted number of drafts of similar requests with this method."""
        _, pool = self._drafts(self._request(state), method)
        trials = pool.accepted.trials
        return trials[0] if trials else 0.0

    def num_expected(self, state: RequestState) -> float:
        """Return how many further tokens a request is expected to emit.

        That is the mean output of ended requests, whatever the request has emitted, as if every
        token ended it with the same probability. A request that has emitted more than the mean is
        expected to emit as much again.
        """
        request = self._request(state)
        num_emitted = state.num_committed - request.num_before
        mean = self._output_tokens / self._num_ended
        return min(float(state.max_new), max(mean, float(num_emitted)))

    def end(self, state: RequestState) -> None:
        """Count the output of a request that has ended."""
        num_emitted = state.num_committed - self._request(state).num_before
        memory = self.config.memory
        self._num_ended = self._num_ended * memory + 1.0
        self._output_tokens = self._output_tokens * memory + num_emitted

    def observe(self, record: StepRecord) -> int:
        """Update the estimates from a step in which a request was allowed to draft.

        Returns the tokens that its drafter had to process first.
        """
        request = self._requests.get(record.request_id)
        if request is None:
            return 0
        self._means.clear()
        num_unread = record.context_tokens - request.num_read.get(record.method, 0)
        request.num_read[record.method] = record.context_tokens + record.num_emitted
        for drafts in self._drafts(request, record.method):
            drafts.observe(record)
        return num_unread

    def _request(self, state: RequestState) -> RequestHistory:
        request = self._requests.get(state.request_id)
        if request is None:
            make_room(self._requests)
            kind = state.tags, round(state.temperature, 1)
            request = RequestHistory(kind, state.num_committed)
            self._requests[state.request_id] = request
        return request

    def _drafts(self, request: RequestHistory, method: str) -> tuple[DraftHistory, DraftHistory]:
        """Return the outcomes of one drafter for a request, and for all similar requests."""
        found = request.drafts.get(method)
        if found is None:
            pool = self._pools.get((request.kind, method))
            if pool is None:
                make_room(self._pools)
                pool = self._pools[request.kind, method] = DraftHistory(self.config)
            found = request.drafts[method] = DraftHistory(self.config), pool
        return found


def make_room(remembered: dict[Any, Any]) -> None:
    if len(remembered) >= MAX_REMEMBERED:
        del remembered[next(iter(remembered))]


def first_children(ranks: Sequence[int], children: Sequence[int]) -> tuple[int, int]:
    """Return how many first children on a path were accepted, and how many were drafted."""
    num_passed = next((at for at, rank in enumerate(ranks) if rank > 1), len(ranks))
    return num_passed, num_passed + (children[num_passed] > 0)
