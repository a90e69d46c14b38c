"""How far drafts are accepted: given as figures, or counted in a trace, with its standard error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

from forerun.errors import InvalidRequest
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.intervals import Interval
from forerun.theory.speedup import acceptance_length, constant_survival, survival

__all__ = ["MIN_REACHED", "Acceptance", "counted", "given", "improved"]

Z_95 = 1.959963984540054
"""Where the standard normal reaches 97.5%."""
MIN_REACHED = 20
"""Fewer steps at a position say too little to draft that far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Survival by position, as deep as it is known.

    Attributes:
        survival: P(accepted through i) for i = 1..deepest.
        requests: counts of every request it was taken from; empty where it was given.
        is_constant: given as one alpha, which holds at any depth.
    """

    survival: tuple[float, ...]
    requests: tuple[AcceptanceCounts, ...] = ()
    is_constant: bool = False

    @property
    def conditional(self) -> tuple[float, ...]:
        """P(position i accepted | all before it accepted)."""
        before = (1.0, *self.survival[:-1])
        return tuple(s / b if b else 0.0 for s, b in zip(self.survival, before, strict=True))

    def length(self, num_speculative_tokens: int) -> Interval:
        """tau at K, with its 95% interval where there were several requests.

        Requests are what is independent, steps of one request are not: the variance is that of
        the requests' first-order influence on tau.
        """
        k = num_speculative_tokens
        if k > len(self.survival):
            raise ValueError(f"acceptance is known for {len(self.survival)} positions, not {k}")
        tau = acceptance_length(self.survival[:k])
        reach = Z_95 * self._standard_error(k)
        return Interval(estimate=tau, low=max(1.0, tau - reach), high=min(k + 1.0, tau + reach))

    def _standard_error(self, k: int) -> float:
        """Source: the delta method, clustered by request (Huber 1967)."""
        num_requests = len(self.requests)
        if num_requests < 2 or k == 0:
            return 0.0
        reached = [padded(counts.reached_per_position, k) for counts in self.requests]
        accepted = [padded(counts.accepted_per_position, k) for counts in self.requests]
        totals = [sum(column) for column in zip(*reached, strict=True)]
        alphas = self.conditional[:k]
        weights = [
            slope / total if total else 0.0
            for slope, total in zip(slopes(alphas), totals, strict=True)
        ]
        influences = [
            sum(w * (a - p * r) for w, a, p, r in zip(weights, its, alphas, of, strict=True))
            for its, of in zip(accepted, reached, strict=True)
        ]
        spread = math.fsum(influence * influence for influence in influences)
        return math.sqrt(num_requests / (num_requests - 1) * spread)


def given(figures: Sequence[float], *, conditional: bool, max_k: int) -> Acceptance:
    """Acceptance somebody names.

    Args:
        figures: one is a constant alpha; several are beta by position, or with `conditional` the
            acceptance of each position given all before it.
        conditional: what several figures are.
        max_k: how deep a constant goes.

    Raises:
        InvalidRequest: there is none, one is no probability, or beta rises.
    """
    if not figures:
        raise InvalidRequest("acceptance is empty; give alpha, or one figure per drafted position")
    for figure in figures:
        if not 0.0 <= figure <= 1.0:
            raise InvalidRequest(f"acceptance {figure:g} is no probability; it must be in [0, 1]")
    if len(figures) == 1:
        return Acceptance(survival=constant_survival(figures[0], max_k), is_constant=True)
    if conditional:
        return Acceptance(survival=survival(figures))
    for position, (before, here) in enumerate(pairwise(figures), start=2):
        if here > before:
            raise InvalidRequest(
                f"acceptance rate {here:g} at position {position} is above {before:g} before it, "
                "which is impossible: whoever accepts through a position accepts through those "
                "before it. If these are conditional on the positions before, say --conditional"
            )
    return Acceptance(survival=tuple(figures))


def counted(requests: Iterable[AcceptanceCounts]) -> Acceptance:
    """Acceptance of traced requests, as deep as enough steps went.

    Raises:
        InvalidRequest: they drafted next to nothing.
    """
    found = tuple(counts for counts in requests if counts.max_depth)
    pooled = sum(found, AcceptanceCounts())
    reached = pooled.reached_per_position
    deepest = next((i for i, n in enumerate(reached) if n < MIN_REACHED), len(reached))
    if not deepest:
        raise InvalidRequest(
            f"{sum(counts.num_steps for counts in found)} steps drafted anything; "
            f"a plan needs at least {MIN_REACHED}"
        )
    return Acceptance(survival=pooled.survival[:deepest], requests=found)


def improved(acceptance: Acceptance, share: float) -> Acceptance:
    """A better aligned draft: at every position `share` of the rejections are gone."""
    better = [1.0 - (1.0 - share) * (1.0 - alpha) for alpha in acceptance.conditional]
    return Acceptance(survival=survival(better), is_constant=acceptance.is_constant)


def padded(counts: Sequence[int], length: int) -> list[int]:
    """The first `length`, zeros where a request drafted less deep."""
    return [*counts[:length], *[0] * (length - len(counts))]


def slopes(alphas: Sequence[float]) -> list[float]:
    """Derivative of tau by the acceptance of each position: what is before times what follows."""
    before = [1.0, *accumulate(alphas[:-1], mul)]
    follows = [1.0]
    for alpha in reversed(alphas[1:]):
        follows.append(1.0 + alpha * follows[-1])
    return [b * f for b, f in zip(before, reversed(follows), strict=True)]
