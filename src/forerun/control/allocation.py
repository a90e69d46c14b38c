"""Which requests of a batch draft how deep: the most expected tokens per second of the step.

Nodes are given out in the order of their survival (`theory.budget`), and every number of them is
priced: a row costs its share of the target pass, a level a draft pass however few go that deep. So
the budget R comes from v(n), plain decoding is the choice of 0 nodes, and how deep anybody may go
is searched as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from forerun.control.beliefs import Curve
from forerun.control.step_times import StepTimes
from forerun.theory.budget import Node, ranked_nodes

__all__ = ["Allocation", "Candidate", "Pricing", "best_allocation", "priced"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
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
    draft_factors: Mapping[str, float] = field(default_factory=dict)
    catch_up: float = 0.0


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
        "tokens",
    )

    def __init__(self, candidates: Sequence[Candidate], pricing: Pricing) -> None:
        self.candidates = candidates
        self.pricing = pricing
        self.tokens = float(len(candidates))
        self.rows = self.draft_s = self.overhead_s = 0.0
        self.depths = [0] * len(candidates)
        self.active: dict[tuple[str, int], int] = {}

    def add(self, index: int) -> None:
        """One node more for a request: its next one."""
        candidate, depth = self.candidates[index], self.depths[index]
        times = self.pricing.times[candidate.method]
        survival, drafted = candidate.curve
        level = (candidate.method, depth)
        active = self.active.get(level, 0)
        node_s = times.draft_s[active]
        if active:
            node_s -= times.draft_s[active - 1]
        elif depth == 0:  # methods beside each other take their overheads one after another
            self.overhead_s += times.overhead_s
        if depth == 0 and candidate.was == 0:
            node_s *= 1.0 + self.pricing.catch_up
        self.active[level] = active + 1
        self.depths[index] = depth + 1
        node_s *= self.pricing.draft_factors.get(candidate.method, 1.0)
        self.draft_s += drafted[depth] * node_s
        self.tokens += survival[depth]
        self.rows += drafted[depth]

    @property
    def step_s(self) -> float:
        """What the step takes as it stands."""
        pricing = self.pricing
        times = pricing.times[self.candidates[0].method]
        if not self.active:
            return times.plain_s * pricing.plain_factor
        rest_s = self.overhead_s + times.verify_nodes_s(self.rows)
        return self.draft_s + rest_s * pricing.factor

    def lateness(self, step_s: float) -> float:
        """How far the request that suffers most is beyond its wish."""
        worst = 0.0
        for candidate, depth in zip(self.candidates, self.depths, strict=True):
            if candidate.limit_s is not None:
                tokens = 1.0 + sum(candidate.curve.survival[:depth])
                worst = max(worst, step_s / (tokens * candidate.limit_s))
        return worst

    def allocation(self, step_s: float, lateness: float) -> Allocation:
        """What there is so far."""
        return Allocation(
            depths=tuple(self.depths), tokens=self.tokens, step_s=step_s, lateness=lateness
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
    plain = priced(candidates, pricing, [0] * len(candidates))
    nodes = ranked_nodes([candidate.curve.survival for candidate in candidates])
    deepest = max((node.depth + 1 for node in nodes), default=0)
    if len(candidates) == 1:  # all its prefixes are priced on the way
        return best_prefix(nodes[:max_nodes], candidates, pricing, plain, plain.lateness)
    best, was = plain, max(candidate.was for candidate in candidates)
    coarse = {1 << n for n in range(deepest.bit_length())} | {min(was, deepest)}

    def tried(depth: int) -> Allocation:
        within = [node for node in nodes if node.depth < depth][:max_nodes]
        return best_prefix(within, candidates, pricing, best, plain.lateness)

    for depth in sorted(coarse):
        best = tried(depth)
    reached = max(best.depths)
    for depth in sorted({reached - 1, reached + 1} - coarse):
        best = tried(depth)
    return best


def best_prefix(
    nodes: Iterable[Node],
    candidates: Sequence[Candidate],
    pricing: Pricing,
    best: Allocation,
    late: float,
) -> Allocation:
    """The best of `best` and what there is after any number of nodes; none later than `late`."""
    most_late = max(1.0, late)
    has_wishes = late > 0.0
    tally, best_rate = Tally(candidates, pricing), best.tokens_per_s
    for node in nodes:
        tally.add(node.index)
        step_s = tally.step_s
        if tally.tokens > best_rate * step_s:
            lateness = tally.lateness(step_s) if has_wishes else 0.0
            if lateness <= most_late:
                best = tally.allocation(step_s, lateness)
                best_rate = best.tokens_per_s
    return best


def priced(candidates: Sequence[Candidate], pricing: Pricing, depths: Sequence[int]) -> Allocation:
    """What given K would bring; cut to what every request may draft."""
    tally = Tally(candidates, pricing)
    for index, (candidate, wanted) in enumerate(zip(candidates, depths, strict=True)):
        for _ in candidate.curve.survival[:wanted]:
            tally.add(index)
    step_s = tally.step_s
    return tally.allocation(step_s, tally.lateness(step_s))
