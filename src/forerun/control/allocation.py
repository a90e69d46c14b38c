"""Choice of draft depths for the requests of a step, to maximise expected tokens per second.

Nodes are given out in the order of their survival (`theory.budget`), and every number of them is
priced: a row costs its share of the target pass, a level a draft pass and its overhead. So the
number of nodes follows from v(n), plain decoding is the choice of 0 nodes, and the largest depth is
searched as well. Trees are priced in the same way: nodes as rows of the target pass, levels as
draft passes of all requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

from forerun.control.beliefs import AcceptanceCurve
from forerun.control.step_times import StepTimes
from forerun.theory.budget import Node, ranked_nodes

__all__ = [
    "Allocation",
    "Allocator",
    "BatchAllocator",
    "Pricing",
    "RequestCandidate",
    "SingleRequestAllocator",
    "TreeLevels",
    "allocator",
    "best_tree",
]


class RequestCandidate(NamedTuple):
    """One request that may draft.

    Attributes:
        method: its drafter.
        curve: what drafting deeper brings.
        limit_s: seconds per token it should stay below, None without a limit.
        was: K of its last step.
    """

    method: str
    curve: AcceptanceCurve
    limit_s: float | None = None
    was: int = 0


class TreeLevels(NamedTuple):
    """The drafter and the number of levels of all draft trees in a step."""

    method: str
    depth: int


class Allocation(NamedTuple):
    """K of each request in a step, with the expected tokens and duration of the step.

    Attributes:
        depths: K, in the order of the candidates.
        tokens: expected to be emitted in the step, over all requests.
        step_s: what it is expected to take.
        lateness: largest expected time per token over a request's limit; 0 without limits.
        tree: drafter and levels where drafts are trees, of which `depths` are the nodes; else None.
    """

    depths: tuple[int, ...]
    tokens: float
    step_s: float
    lateness: float = 0.0
    tree: TreeLevels | None = None

    @property
    def tokens_per_s(self) -> float:
        """Expected tokens per second of the step, which allocators maximise."""
        return self.tokens / self.step_s


class Pricing(NamedTuple):
    """Expected durations of a step with a given batch, by what is drafted.

    Attributes:
        times: by method.
        plain_factor: by which expected times of plain steps are multiplied.
        factor: the same of target passes over drafted nodes.
        draft_factors: the same of all else in a speculative step, by method; 1 where there is none.
        tree_factors: the same of steps with trees.
    """

    times: dict[str, StepTimes]
    plain_factor: float = 1.0
    factor: float = 1.0
    draft_factors: Mapping[str, float] = MappingProxyType({})
    tree_factors: Mapping[str, float] = MappingProxyType({})


@runtime_checkable
class Allocator(Protocol):
    """Chooses how many tokens each request of one step drafts."""

    def best(self, max_nodes: int) -> Allocation:
        """Return the allocation with the most expected tokens per second within the time limits.

        Speculation must not make a request miss its time limit: where one would, only allocations
        that make no request later than plain decoding are allowed. Where plain decoding itself
        exceeds a limit, only allocations that reduce the excess are allowed.

        Args:
            max_nodes: rows there are for drafted nodes.
        """

    def at(self, depths: Sequence[int]) -> Allocation:
        """Return the allocation at given depths, each limited by its request's largest depth."""


class DraftCosting(NamedTuple):
    """Cost terms of draft nodes for one drafter, computed once for all nodes."""

    drafted: Sequence[float]
    deltas_s: Sequence[float]
    overheads_s: Sequence[float]
    active: list[int]


class BatchAllocator:
    """Allocator for a step of several requests.

    Args:
        candidates: requests that may draft, at least one.
        pricing: what it takes.

    Attributes:
        row_s: what one more node takes at least.
        saved_s: what levels that cost less than nothing may take off a step at most.
    """

    __slots__ = (
        "actives", "candidates", "limits", "plain_s", "pricing", "row_s", "saved_s", "times",
        "ways",
    )  # fmt: skip

    def __init__(self, candidates: Sequence[RequestCandidate], pricing: Pricing) -> None:
        self.candidates = candidates
        self.pricing = pricing
        self.times = pricing.times[candidates[0].method]
        self.plain_s = self.times.plain_s * pricing.plain_factor
        self.limits = [
            (index, c.limit_s, [0.0, *accumulate(c.curve.survival)])
            for index, c in enumerate(candidates)
            if c.limit_s is not None
        ]
        deepest = max([len(c.curve.survival) for c in candidates])
        seldom = min([c.curve.drafted[-1] for c in candidates if c.curve.drafted], default=1.0)
        common, saved_s = {}, 0.0
        for method, times in pricing.times.items():
            factor = pricing.draft_factors.get(method, 1.0)
            deltas_s = [delta_s * factor for delta_s in times.draft_deltas_s]
            overheads_s = [delta_s * factor for delta_s in times.overhead_deltas_s]
            common[method] = deltas_s, overheads_s, [0] * deepest
            if times.draft_deltas_s[0] + times.least_level_s < 0.0:
                saved_s -= sum([min(0.0, deltas_s[0] + level_s) for level_s in overheads_s])
        self.saved_s = saved_s
        self.row_s = 0.0 if saved_s else seldom * self.times.least_row_s * pricing.factor
        self.actives = [active for _, _, active in common.values()]
        self.ways: list[DraftCosting] = []
        for candidate in candidates:
            deltas_s, overheads_s, active = common[candidate.method]
            self.ways.append(DraftCosting(candidate.curve.drafted, deltas_s, overheads_s, active))

    def best(self, max_nodes: int) -> Allocation:
        """Return the allocation with the most expected tokens per second; see `Allocator`."""
        candidates = self.candidates
        plain_s = self.plain_s
        none = (0,) * len(candidates)
        best = Allocation(none, float(len(none)), plain_s, self.lateness(none, plain_s))
        most_late = max(1.0, best.lateness)
        nodes = ranked_nodes([candidate.curve.survival for candidate in candidates])
        # Where a level costs more than the next, a search by neighbours would end before its time.
        deepest = max([len(candidate.curve.survival) for candidate in candidates])
        for depth in range(1, deepest + 1):
            best = self._shallower(depth, nodes, max_nodes, best, most_late)
        return best

    def at(self, depths: Sequence[int]) -> Allocation:
        """Return the allocation at given depths; see `Allocator`."""
        nodes = [
            (-survived, depth, index)
            for index, (candidate, wanted) in enumerate(zip(self.candidates, depths, strict=True))
            for depth, survived in enumerate(candidate.curve.survival[:wanted])
        ]
        plain = float(len(self.candidates)), self.plain_s
        tokens, step_s = (plain, *self._growing(nodes))[-1]
        found = depths_of(nodes, len(self.candidates))
        return Allocation(found, tokens, step_s, self.lateness(found, step_s))

    def lateness(self, depths: Sequence[int], step_s: float) -> float:
        """Largest ratio of a request's expected time per token to its limit; 0 without limits."""
        worst = 0.0
        for index, limit_s, accepted in self.limits:
            late = step_s / ((1.0 + accepted[depths[index]]) * limit_s)
            if late > worst:
                worst = late
        return worst

    def _shallower(
        self, limit: int, nodes: Sequence[Node], max_nodes: int, best: Allocation, most_late: float
    ) -> Allocation:
        """Return the better of `best` and the best allocation with no draft deeper than `limit`."""
        best_rate = best.tokens_per_s
        saved_s = self.saved_s
        needed = best_rate * self.row_s  # a node of less survival pays nowhere
        nodes = [node for node in nodes if node[1] < limit and -node[0] > needed][:max_nodes]
        most = len(self.candidates) - sum([lost for lost, _, _ in nodes])
        num_left = len(nodes)
        depths = [0] * len(self.candidates)
        found = None
        for (_, depth, index), (tokens, step_s) in zip(nodes, self._growing(nodes), strict=True):
            depths[index] = depth + 1
            num_left -= 1
            if tokens > best_rate * step_s:
                lateness = self.lateness(depths, step_s)
                if lateness <= most_late:
                    best_rate = tokens / step_s
                    found = num_left, tokens, step_s, lateness
            if most - num_left * needed <= best_rate * (step_s - saved_s):
                break  # even if all that is left took no drafting
        if found is None:
            return best
        num_left, tokens, step_s, lateness = found
        within = depths_of(nodes[: len(nodes) - num_left], len(depths))
        return Allocation(within, tokens, step_s, lateness)

    def _growing(self, nodes: Sequence[Node]) -> Iterator[tuple[float, float]]:
        """Yield tokens and seconds of the step after each added node, in the given order."""
        ways, factor, verify_s = self.ways, self.pricing.factor, self.times.verify_s
        for active in self.actives:
            active[:] = [0] * len(active)
        tokens, rows, draft_s, overhead_s = float(len(ways)), 0.0, 0.0, 0.0
        for lost, depth, index in nodes:
            drafted, deltas_s, overheads_s, active = ways[index]
            num_active = active[depth]
            active[depth] = num_active + 1
            reached = drafted[depth]
            tokens -= lost
            rows += reached
            draft_s += reached * deltas_s[num_active]
            if num_active == 0:  # methods beside each other pay their overheads one by one
                overhead_s += (reached if depth else 1.0) * overheads_s[depth]
            below = int(rows)
            rest_s = verify_s[below]
            if share := rows - below:
                rest_s += share * (verify_s[below + 1] - rest_s)
            yield tokens, draft_s + overhead_s + rest_s * factor


class SingleRequestAllocator:
    """Allocator for a step of one request: compares every K from 0 on.

    Args:
        candidate: the request.
        pricing: what steps take.
        batch: requests in the step, taken to be all like this one.
    """

    __slots__ = ("limit_s", "steps_s", "tokens")

    def __init__(self, candidate: RequestCandidate, pricing: Pricing, batch: int = 1) -> None:
        self.limit_s = candidate.limit_s
        times = pricing.times[candidate.method]
        own_factor = pricing.draft_factors.get(candidate.method, 1.0)
        draft_s = times.draft_s[batch - 1] * own_factor
        factor, verify_s = pricing.factor, times.verify_s
        tokens, depth, overhead_s = 1.0, 0.0, 0.0
        self.tokens = [tokens]
        self.steps_s = [times.plain_s * pricing.plain_factor]
        overheads_s = times.overhead_deltas_s[: len(candidate.curve.survival)]
        levels = zip(*candidate.curve, overheads_s, strict=True)
        for level, (survived, drafted, more_s) in enumerate(levels):
            tokens += survived
            depth += drafted
            # That a draft may come to nothing is no reason to take its step for a cheap one.
            overhead_s += (drafted if level else 1.0) * more_s * own_factor
            below = int(nodes := depth * batch)
            pass_s = verify_s[below]
            if share := nodes - below:
                pass_s += share * (verify_s[below + 1] - pass_s)
            self.tokens.append(tokens)
            self.steps_s.append(depth * draft_s + overhead_s + pass_s * factor)

    @property
    def best_rate(self) -> float:
        """Tokens per second of the request at its best K, without regard to time limits."""
        return max([tokens / s for tokens, s in zip(self.tokens, self.steps_s, strict=True)])

    def best(self, max_nodes: int) -> Allocation:
        """Return the K with the most expected tokens per second, which also minimises lateness.

        Args:
            max_nodes: largest K there is room for.
        """
        tokens, steps_s = self.tokens, self.steps_s
        best, best_rate = 0, 1.0 / steps_s[0]
        for k in range(1, min(max_nodes + 1, len(tokens))):
            rate = tokens[k] / steps_s[k]
            if rate > best_rate:
                best, best_rate = k, rate
        return self.at((best,))

    def at(self, depths: Sequence[int]) -> Allocation:
        """Return the allocation at a given K, limited by the request's largest depth."""
        k = min(depths[0], len(self.tokens) - 1)
        tokens, step_s, limit_s = self.tokens[k], self.steps_s[k], self.limit_s
        lateness = 0.0 if limit_s is None else step_s / (tokens * limit_s)
        return Allocation((k,), tokens, step_s, lateness)


def allocator(candidates: Sequence[RequestCandidate], pricing: Pricing) -> Allocator:
    """Return the allocator for the requests of a step, of which there is at least one."""
    if len(candidates) == 1:
        return SingleRequestAllocator(candidates[0], pricing)
    return BatchAllocator(candidates, pricing)


def depths_of(nodes: Iterable[Node], num_requests: int) -> tuple[int, ...]:
    """Return K of every request, given for each node the index of its request."""
    depths = [0] * num_requests
    for _, _, index in nodes:
        depths[index] += 1
    return tuple(depths)


def best_tree(
    levels: TreeLevels,
    survival: Sequence[Sequence[float]],
    pricing: Pricing,
    max_nodes: int,
) -> Allocation:
    """Return the allocation of nodes to trees with the most expected tokens per second.

    Args:
        levels: drafter and depth of all trees.
        survival: per request, P(accepted) of the nodes of its tree, the best first.
        pricing: what steps take.
        max_nodes: rows there are for drafted nodes.
    """
    batch, times = len(survival), pricing.times[levels.method]
    factor = pricing.tree_factors.get(levels.method, 1.0)
    draft_s = times.tree_s(levels.depth, batch) * factor
    nodes = ranked_nodes(survival)[:max_nodes]
    best = Allocation((0,) * batch, batch, times.plain_s * pricing.plain_factor)
    tokens, best_rate, num_best = float(batch), best.tokens_per_s, 0
    for num_nodes, (lost, _, _) in enumerate(nodes, start=1):
        tokens -= lost
        step_s = draft_s + times.verify_s[num_nodes] * pricing.factor
        if tokens > best_rate * step_s:
            best_rate, num_best = tokens / step_s, num_nodes
            best = Allocation((), tokens, step_s, tree=levels)
    return best._replace(depths=depths_of(nodes[:num_best], batch))
