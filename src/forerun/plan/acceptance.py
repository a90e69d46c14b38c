"""Acceptance by position with its standard error, given by the user or counted in a trace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

from forerun.errors import InvalidRequest
from forerun.plan.traced import Drafts
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.intervals import Interval, normal_interval
from forerun.theory.speedup import (
    acceptance_length,
    constant_survival,
    survival,
)

MIN_ALLOWED = 20
"""Least number of steps allowed to draft a depth for a plan to use that depth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Acceptance by position when drafts have a given K.

    Attributes:
        survival: P(accepted through i) for i = 1..K.
        drafted: P(drafted through i), below 1 where the drafter itself may end a draft.
        standard_error: of tau, 0 where it is not known.
    """

    survival: tuple[float, ...]
    drafted: tuple[float, ...]
    standard_error: float = 0.0

    @classmethod
    def of(cls, survival: Sequence[float]) -> Drafting:
        return cls(survival=tuple(survival), drafted=(1.0,) * len(survival))


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Acceptance for every K at which it was measured or given.

    Attributes:
        num_requests: it was counted in; 0 where it was given.
        is_constant: given as one alpha, which holds at any depth.
    """

    by_k: tuple[Drafting, ...]
    num_requests: int = 0
    is_constant: bool = False

    @classmethod
    def of(cls, survival: Sequence[float], *, is_constant: bool = False) -> Acceptance:
        """Return an acceptance with the same survival for every K."""
        by_k = tuple(Drafting.of(survival[:k]) for k in range(1, len(survival) + 1))
        return cls(by_k=by_k, is_constant=is_constant)

    @property
    def survival(self) -> tuple[float, ...]:
        """Return the probabilities of acceptance through each position at the largest K."""
        return self.by_k[-1].survival if self.by_k else ()

    def at(self, num_speculative_tokens: int) -> Drafting:
        """Return the acceptance at one K; at K = 0 nothing is drafted."""
        k = num_speculative_tokens
        if k > len(self.by_k):
            raise ValueError(f"acceptance is known for {len(self.by_k)} positions, not {k}")
        return self.by_k[k - 1] if k else Drafting.of(())

    def length(self, num_speculative_tokens: int) -> Interval:
        """Return tau at K; its 95% interval needs several requests."""
        drafting = self.at(num_speculative_tokens)
        tau = acceptance_length(drafting.survival)
        most = num_speculative_tokens + 1.0
        return normal_interval(tau, drafting.standard_error, least=1.0, most=most)


def given(figures: Sequence[float], *, conditional: bool, max_k: int) -> Acceptance:
    """Build the acceptance from figures that a user gives.

    Args:
        figures: one is a constant alpha; several are beta by position, or with `conditional` the
            acceptance of each position given all before it.
        conditional: what several figures are.
        max_k: how deep a constant goes.
    """
    if not figures:
        raise InvalidRequest("acceptance is empty; give alpha, or one figure per drafted position")
    for figure in figures:
        if not 0.0 <= figure <= 1.0:
            raise InvalidRequest(f"acceptance {figure:g} is no probability; it must be in [0, 1]")
    if len(figures) == 1:
        return Acceptance.of(constant_survival(figures[0], max_k), is_constant=True)
    if conditional:
        return Acceptance.of(survival(figures))
    for position, (before, here) in enumerate(pairwise(figures), start=2):
        if here > before:
            raise InvalidRequest(
                f"acceptance rate {here:g} at position {position} is above {before:g} before it, "
                "which is impossible: a step that accepts a position has accepted those "
                "before it. If these are conditional on the positions before, add --conditional"
            )
    return Acceptance.of(figures)


def counted(requests: Iterable[Drafts]) -> Acceptance:
    """Return the acceptance of traced requests at all depths allowed in enough steps."""
    found = [drafts for drafts in requests if drafts.drafted.num_accepted]
    pooled = sum(found, Drafts())
    allowed = pooled.accepted.drafted_per_position
    deepest = next((i for i, n in enumerate(allowed) if n < MIN_ALLOWED), len(allowed))
    if not deepest:
        raise InvalidRequest(
            f"{sum(drafts.steps.total() for drafts in found)} steps drafted anything; "
            f"a plan needs at least {MIN_ALLOWED}"
        )
    return Acceptance(
        by_k=tuple(drafting(found, k) for k in range(1, deepest + 1)), num_requests=len(found)
    )


def drafting(requests: Sequence[Drafts], k: int) -> Drafting:
    limited = [drafts.limited(k) for drafts in requests]
    pooled = sum(limited, Drafts())
    return Drafting(
        survival=pooled.accepted.survival[:k],
        drafted=pooled.drafted.survival[:k],
        standard_error=standard_error(
            [drafts.accepted for drafts in limited], pooled.accepted.conditional_acceptance[:k]
        ),
    )


def standard_error(requests: Sequence[AcceptanceCounts], alphas: Sequence[float]) -> float:
    """Return the standard error of tau; requests are independent, steps of one request are not.

    Source: the delta method, clustered by request (Huber 1967).
    """
    num_requests, k = len(requests), len(alphas)
    if num_requests < 2:
        return 0.0
    reached = [padded(counts.reached_per_position, k) for counts in requests]
    accepted = [padded(counts.accepted_per_position, k) for counts in requests]
    totals = [sum(column) for column in zip(*reached, strict=True)]
    weights = [
        slope / total if total else 0.0 for slope, total in zip(slopes(alphas), totals, strict=True)
    ]
    influences = [
        sum(w * (a - p * r) for w, a, p, r in zip(weights, its, alphas, of, strict=True))
        for its, of in zip(accepted, reached, strict=True)
    ]
    spread = math.fsum(influence * influence for influence in influences)
    return math.sqrt(num_requests / (num_requests - 1) * spread)


def padded(counts: Sequence[int], length: int) -> list[int]:
    """Return the first `length` counts, with zeros where a request drafted less deep."""
    return [*counts[:length], *[0] * (length - len(counts))]


def slopes(alphas: Sequence[float]) -> list[float]:
    before = [1.0, *accumulate(alphas[:-1], mul)]
    follows = [1.0]
    for alpha in reversed(alphas[1:]):
        follows.append(1.0 + alpha * follows[-1])
    return [b * f for b, f in zip(before, reversed(follows), strict=True)]
