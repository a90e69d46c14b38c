"""Which requests of a batch draft how deep: the most expected tokens per second of the step.

Nodes are given out in the order of their survival (`theory.budget`), and every number of them is
priced: a level costs a draft pass however few go that deep, a row its share of the target pass. So
the budget R comes from v(n), and plain decoding is the choice of 0 nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.control.beliefs import Curve
from forerun.control.step_times import StepTimes
from forerun.theory.budget import best_nodes

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
        factor: the same of speculative steps.
        catch_up: drafted levels that a request costs on top which did not draft in its last step.
    """

    times: dict[str, StepTimes]
    plain_factor: float = 1.0
    factor: float = 1.0
    catch_up: float = 0.0


class Tally:
    """An allocation while nodes are added to it.

    Args:
        candidates: who may draft.
        pricing: what it takes.
    """

    __slots__ = ("active", "candidates", "depths", "draft_s", "pricing", "rows", "survived")

    def __init__(self, candidates: Sequence[Candidate], pricing: Pricing) -> None:
        self.candidates = candidates
        self.pricing = pricing
        self.depths = [0] * len(candidates)
        self.survived = [0.0] * len(candidates)
        self.active: dict[tuple[str, int], int] = {}
        self.draft_s = 0.0
        self.rows = 0.0

    def add(self, index: int) -> None:
        """One node more for a request: its next one."""
        candidate, depth = self.candidates[index], self.depths[index]
        draft_s = self.pricing.times[candidate.method].draft_s
        level = (candidate.method, depth)
        active = self.active.get(level, 0)
        reached = candidate.curve.drafted[depth]
        level_s = draft_s[active] - (draft_s[active - 1] if active else 0.0)
        self.draft_s += reached * level_s
        if depth == 0 and candidate.was == 0:
            self.draft_s += self.pricing.catch_up * level_s
        self.active[level] = active + 1
        self.depths[index] = depth + 1
        self.survived[index] += candidate.curve.survival[depth]
        self.rows += reached

    @property
    def step_s(self) -> float:
        """What the step takes as it stands."""
        pricing, batch = self.pricing, len(self.candidates)
        if not self.active:
            times = pricing.times[self.candidates[0].method]
            return times.plain_s * pricing.plain_factor
        used = [pricing.times[method] for method in {method for method, _ in self.active}]
        verify_s = used[0].verify_nodes_s(self.rows, batch)
        overhead_s = max(times.overhead_s for times in used)
        return (self.draft_s + verify_s + overhead_s) * pricing.factor

    def lateness(self, step_s: float) -> float:
        """How far the request that suffers most is beyond its wish."""
        return max(
            (
                step_s / ((1.0 + survived) * candidate.limit_s)
                for candidate, survived in zip(self.candidates, self.survived, strict=True)
                if candidate.limit_s is not None
            ),
            default=0.0,
        )

    def allocation(self, tokens: float, step_s: float, lateness: float) -> Allocation:
        """What there is so far."""
        return Allocation(
            depths=tuple(self.depths), tokens=tokens, step_s=step_s, lateness=lateness
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
    tokens = float(len(candidates))
    plain_s = tally.step_s
    has_wishes = any(candidate.limit_s is not None for candidate in candidates)
    lateness = tally.lateness(plain_s) if has_wishes else 0.0
    best, most_late = tally.allocation(tokens, plain_s, lateness), max(1.0, lateness)
    best_rate = best.tokens_per_s
    survival = [candidate.curve.survival for candidate in candidates]
    for (index, gain), _ in zip(best_nodes(survival), range(max_nodes), strict=False):
        tally.add(index)
        tokens += gain
        step_s = tally.step_s
        if tokens > best_rate * step_s:
            lateness = tally.lateness(step_s) if has_wishes else 0.0
            if lateness <= most_late:
                best = tally.allocation(tokens, step_s, lateness)
                best_rate = best.tokens_per_s
    return best


def priced(candidates: Sequence[Candidate], pricing: Pricing, depths: Sequence[int]) -> Allocation:
    """What given K would bring; cut to what every request may draft."""
    tally = Tally(candidates, pricing)
    tokens = float(len(candidates))
    for index, (candidate, wanted) in enumerate(zip(candidates, depths, strict=True)):
        for gain in candidate.curve.survival[:wanted]:
            tally.add(index)
            tokens += gain
    step_s = tally.step_s
    return tally.allocation(tokens, step_s, tally.lateness(step_s))
