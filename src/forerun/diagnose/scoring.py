"""Scores causes: the prior plus the weight of every known fact."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from forerun.diagnose.causes import Cause, Finding
from forerun.diagnose.evidence import Evidence

__all__ = ["MIN_ALSO", "MIN_SUPPORT", "ScoredCause", "score_causes"]

MIN_SUPPORT = 1.3
"""Evidence for a cause, in nats (nearly a factor of four), below which nothing is said."""
MIN_ALSO = 0.5
"""The same for a cause beside one that is supported: what else it may be is worth naming sooner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredCause:
    """A cause with its score and the evidence for and against it.

    Attributes:
        cause: which.
        score: its share of the likelihood of all causes, from 0 to 1.
        evidence_for: facts that speak for it, the strongest first.
        evidence_against: facts that speak against it.
    """

    cause: Cause
    score: float
    evidence_for: tuple[Finding, ...]
    evidence_against: tuple[Finding, ...]

    @property
    def support(self) -> float:
        """Summed weight of the evidence for the cause, in nats."""
        return sum(finding.weight for finding in self.evidence_for)

    @property
    def is_supported(self) -> bool:
        """Whether enough evidence supports the cause, and more than opposes it."""
        return self.reaches(MIN_SUPPORT)

    def reaches(self, support: float) -> bool:
        """Whether the support reaches a threshold after the prior, and exceeds the opposition."""
        against = -sum(finding.weight for finding in self.evidence_against)
        return self.support + min(0.0, self.cause.prior) >= support and self.support > against


def score_causes(evidence: Evidence, causes: Iterable[Cause]) -> tuple[ScoredCause, ...]:
    """Score every cause, the likeliest first.

    The weights of facts add up as if facts were independent given the cause, which they are not
    quite: scores rank causes, and overstate their probabilities.
    """
    found = []
    for cause in causes:
        findings = [
            finding for sign in cause.signs if (finding := sign.finding(evidence)) is not None
        ]
        findings.sort(key=lambda finding: -abs(finding.weight))
        found.append((cause.prior + sum(f.weight for f in findings), cause, findings))
    highest = max(log for log, _, _ in found)
    total = sum(math.exp(log - highest) for log, _, _ in found)
    scored = [
        ScoredCause(
            cause=cause,
            score=math.exp(log - highest) / total,
            evidence_for=tuple(f for f in findings if f.weight > 0.0),
            evidence_against=tuple(f for f in findings if f.weight < 0.0),
        )
        for log, cause, findings in found
    ]
    # A cause without support may have no opposition either; it is no finding.
    return tuple(sorted(scored, key=lambda i: (-i.is_supported, -i.reaches(MIN_ALSO), -i.score)))
