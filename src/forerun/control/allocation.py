"""Which requests of a batch draft how deep: the most expected tokens per second of the step.

Nodes are given out in the order of their survival (`theory.budget`), and every number of them is
priced: a row costs its share of the target pass, a level a draft pass however few go that deep. So
the budget R comes from v(n), plain decoding is the choice of 0 nodes, and how deep anybody may go
is searched as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

from forerun.control.beliefs import Curve
from forerun.control.step_times import StepTimes
from forerun.theory.budget import Node, ranked_nodes

__all__ = ["Allocation", "Candidate", "Pricing", "best_allocation", "priced"]


class Candidate(NamedTuple):
    """One request that may draft.

    Attributes:
        method: its drafter.
        curve: what drafting deeper brings.
        limit_s: seconds per token it should stay below, None without a wish.
        was: K of its last step.
    """

    method: str
    curve: Curve
    limit_s: float | None = None
    was: int = 0


class Allocation(NamedTuple):
    """K per request, and what is expected of it.

    Attributes:
        depths: K, in the order of the candidates.
        tokens: expected to be emitted in the step, over all requests.
        step_s: what it is expected to take.
        lateness: largest expected time per token over what a request wishes; 0 without wishes.
    """

    depths: tuple[int, ...]
    tokens: float
    step_s: float
    lateness: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """What is maximised."""
        return self.tokens / self.step_s


class Pricing(NamedTuple):
    """What steps of this batch take.

    Attributes:
        times: by method.
        plain_factor: by which expected times of plain steps are multiplied.
        factor: the same of speculative steps, drafting apart.
        draft_factors: the same of drafting, by method; 1 where there is none.
        catch_up: drafted levels that a request costs on top which did not draft in its last step.
    """

    times: dict[str, StepTimes]
    plain_factor: float = 1.0
    factor: float = 1.0
    draft_factors: Mapping[str, float] = MappingProxyType({})
    catch_up: float = 0.0


class Way(NamedTuple):
    """What adding nodes to one request does; looked up once, for nodes are many."""

    survival: Sequence[float]
    drafted: Sequence[float]
    deltas: Sequence[float]
    factor: float
    overhead_s: float
    restart: float
    active: list[int]


class Tally:
    """An allocation while nodes are added to it.

    Args:
        candidates: who may draft.
        pricing: what it takes.
    """

    __slots__ = (
        "active",
        "candidates",
        "depths",
        "draft_s",
        "overhead_s",
        "pricing",
        "rows",
        "times",
        "tokens",
        "ways",
        "wishes",
    )

    def __init__(self, candidates: Sequence[Candidate], pricing: Pricing) -> None:
        self.candidates = candidates
        self.pricing = pricing
        self.times = pricing.times[candidates[0].method]
        deepest = max([len(candidate.curve.survival) for candidate in candidates])
        self.active = {method: [0] * deepest for method in pricing.times}
        self.wishes = [
            (index, c.limit_s, [0.0, *accumulate(c.curve.survival)])
            for index, c in enumerate(candidates)
            if c.limit_s is not None
        ]
        self.ways = [
            Way(
                survival=candidate.curve.survival,
                drafted=candidate.curve.drafted,
                deltas=pricing.times[candidate.method].draft_deltas_s,
                factor=pricing.draft_factors.get(candidate.method, 1.0),
                overhead_s=pricing.times[candidate.method].overhead_s,
                restart=1.0 if candidate.was else 1.0 + pricing.catch_up,
                active=self.active[candidate.method],
            )
            for candidate in candidates
        ]
        self._begin()

    def _begin(self) -> None:
        self.tokens = float(len(self.candidates))
        self.rows = self.draft_s = self.overhead_s = 0.0
        self.depths = [0] * len(self.candidates)

    def clear(self) -> None:
        """Take all nodes away again; cheaper than another tally."""
        self._begin()
        for active in self.active.values():
            active[:] = [0] * len(active)

    def add(self, index: int) -> None:
        """One node more for a request: its next one."""
        survival, drafted, deltas, factor, overhead_s, restart, active = self.ways[index]
        depth = self.depths[index]
        self.depths[index] = depth + 1
        num_active = active[depth]
        active[depth] = num_active + 1
        node_s = deltas[num_active] * factor
        if depth == 0:
            node_s *= restart
            if num_active == 0:  # methods beside each other pay their overheads one after another
                self.overhead_s += overhead_s
        reached = drafted[depth]
        self.draft_s += reached * node_s
        self.rows += reached
        self.tokens += survival[depth]

    @property
    def step_s(self) -> float:
        """What the step takes as it stands."""
        if self.rows == 0.0:
            return self.times.plain_s * self.pricing.plain_factor
        rest_s = self.overhead_s + self.times.verify_nodes_s(self.rows)
        return self.draft_s + rest_s * self.pricing.factor

    def lateness(self, step_s: float) -> float:
        """How far the request that suffers most is beyond its wish."""
        worst = 0.0
        for index, limit_s, accepted in self.wishes:
            late = step_s / ((1.0 + accepted[self.depths[index]]) * limit_s)
            if late > worst:
                worst = late
        return worst

    def at(self, depths: Sequence[int]) -> Allocation:
        """Given K alone; cut to what every request may draft."""
        self.clear()
        for index, (candidate, wanted) in enumerate(zip(self.candidates, depths, strict=True)):
            for _ in candidate.curve.survival[:wanted]:
                self.add(index)
        step_s = self.step_s
        return Allocation(
            depths=tuple(self.depths),
            tokens=self.tokens,
            step_s=step_s,
            lateness=self.lateness(step_s),
        )


def best_allocation(
    candidates: Sequence[Candidate], pricing: Pricing, max_nodes: int
) -> Allocation:
    """The allocation of most expected tokens per second.

    Speculation must not make a request late: where somebody would be, only what makes nobody later
    than plain decoding does is allowed. Where plain decoding itself is too slow for a wish, what
    helps is allowed and everything else is not.

    Args:
        candidates: the requests of the step, at least one.
        pricing: what steps take.
        max_nodes: rows there are for drafted nodes.
    """
    tally = Tally(candidates, pricing)
    plain = tally.at([0] * len(candidates))
    nodes = ranked_nodes([candidate.curve.survival for candidate in candidates])
    deepest = max(len(candidate.curve.survival) for candidate in candidates)
    if len(candidates) == 1:  # all its prefixes are priced on the way
        return best_prefix(nodes[:max_nodes], tally, plain, plain.lateness)
    best, was = plain, max(candidate.was for candidate in candidates)
    # Beside the last depth, or from scratch where nobody drafted.
    coarse = {min(was, deepest)} if was else {1 << n for n in range(deepest.bit_length())}

    def tried(depth: int) -> Allocation:
        within = [node for node in nodes if node[1] < depth][:max_nodes]
        return best_prefix(within, tally, best, plain.lateness)

    for depth in sorted(coarse):
        best = tried(depth)
    reached = max(best.depths)
    for depth in sorted({reached - 1, reached, reached + 1} - coarse):
        best = tried(depth)
    return best


def best_prefix(nodes: Sequence[Node], tally: Tally, best: Allocation, late: float) -> Allocation:
    """The best of `best` and what there is after any number of nodes; none later than `late`."""
    most_late = max(1.0, late)
    has_wishes = late > 0.0
    best_rate = best.tokens_per_s
    tally.clear()
    num_left, num_best = len(nodes), 0
    for lost, _, index in nodes:
        tally.add(index)
        step_s = tally.step_s
        num_left -= 1
        if tally.tokens - num_left * lost <= best_rate * step_s:
            break  # even if all that is left were worth as much as this one, at no cost
        if tally.tokens > best_rate * step_s:
            lateness = tally.lateness(step_s) if has_wishes else 0.0
            if lateness <= most_late:
                num_best, best_rate = len(nodes) - num_left, tally.tokens / step_s
    if not num_best:
        return best
    depths = [0] * len(tally.candidates)
    for _, _, index in nodes[:num_best]:
        depths[index] += 1
    return tally.at(depths)


def priced(candidates: Sequence[Candidate], pricing: Pricing, depths: Sequence[int]) -> Allocation:
    """What given K would bring; cut to what every request may draft."""
    return Tally(candidates, pricing).at(depths)
