"""One request alone, or one like all others: every K is priced, which takes one pass over them."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.control.beliefs import AcceptanceCurve
from forerun.control.pricing import Allocation, Pricing, RequestCandidate

__all__ = ["SingleRequestAllocator", "break_even"]

HALVINGS = 6
"""Of the range that a rate is looked for in."""


class SingleRequestAllocator:
    """Every K of a request from 0 on: tokens expected of a step, and what it takes.

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
        missed_s = 0.0 if candidate.was else pricing.catch_up * draft_s
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
            self.steps_s.append(missed_s + depth * draft_s + overhead_s + pass_s * factor)

    @property
    def best_rate(self) -> float:
        """Tokens per second and request at the best K, wishes apart."""
        return max([tokens / s for tokens, s in zip(self.tokens, self.steps_s, strict=True)])

    def best(self, max_nodes: int) -> Allocation:
        """The K of most expected tokens per second, which is also the one that is least late.

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
        """Given K; cut to what the request may draft."""
        k = min(depths[0], len(self.tokens) - 1)
        tokens, step_s, limit_s = self.tokens[k], self.steps_s[k], self.limit_s
        lateness = 0.0 if limit_s is None else step_s / (tokens * limit_s)
        return Allocation((k,), tokens, step_s, lateness)


def break_even(method: str, pricing: Pricing, batch: int, max_k: int) -> float:
    """Rate of acceptance, the same at every position, above which some K pays.

    Args:
        method: of the drafter.
        pricing: what steps take.
        batch: requests in the step, taken to be all alike.
        max_k: largest K.

    Returns:
        To within 0.02, what is to be caught up with apart; 1 where no K ever pays.
    """
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        rate = (low + high) / 2.0
        survival = [rate**depth for depth in range(1, max_k + 1)]
        curve = AcceptanceCurve(survival, [1.0] * max_k)
        ladder = SingleRequestAllocator(RequestCandidate(method, curve, was=max_k), pricing, batch)
        if ladder.best_rate > 1.0 / ladder.steps_s[0]:
            high = rate
        else:
            low = rate
    return high
