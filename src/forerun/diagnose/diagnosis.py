"""Makes a diagnosis from evidence: attribution, ranked causes, next test and predicted gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from forerun.diagnose.attribution import Attribution, attribute
from forerun.diagnose.causes import (
    CAUSES,
    MIN_ALSO,
    Experiment,
    Remedy,
    ScoredCause,
    best_experiment,
    experiment_for,
    score_causes,
)
from forerun.diagnose.derive import NO_GAIN, derive
from forerun.diagnose.evidence import Evidence
from forerun.diagnose.prediction import Outlook, Prediction, add_predictions, outlook_of, predict
from forerun.theory.cost import CostTable
from forerun.theory.record import Json

Verdict = Literal["healthy", "problem", "insufficient evidence"]
MAX_CAUSES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A remedy with its predicted speedup, which is None for remedies that do not affect speed."""

    remedy: Remedy
    prediction: Prediction | None

    def to_dict(self) -> dict[str, Json]:
        return {
            "change": self.remedy.change,
            "price": self.remedy.price,
            "effect": self.remedy.effect,
            "predicted": None if self.prediction is None else asdict(self.prediction),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedCause:
    """A cause with its score, the test that would confirm it, and its remedies.

    Attributes:
        next_test: what would confirm or clear it; None where all it depends on is known.
        changes: what helps if it is the cause.
    """

    scored: ScoredCause
    next_test: Experiment | None
    changes: tuple[Change, ...]

    def to_dict(self) -> dict[str, Json]:
        test = self.next_test
        return {
            "label": self.scored.cause.label,
            "score": self.scored.score,
            "what": self.scored.cause.what,
            "why": self.scored.cause.why,
            "evidence_for": [
                {"fact": f.fact.name, "weight": f.weight, "words": f.words}
                for f in self.scored.evidence_for
            ],
            "evidence_against": [
                {"fact": f.fact.name, "weight": f.weight, "words": f.words}
                for f in self.scored.evidence_against
            ],
            "next_test": None if test is None else test.how,
            "remedies": [change.to_dict() for change in self.changes],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The result of a diagnosis.

    Attributes:
        verdict: healthy, problem, or that too little is known.
        attribution: where the time per token goes; None where tau or K is not known.
        causes: likely causes, the likeliest first; empty without enough evidence.
        next_test: the test that tells the likeliest causes apart best for its time.
        evidence: everything it rests on, with what was derived.
    """

    verdict: Verdict
    attribution: Attribution | None
    causes: tuple[RankedCause, ...]
    next_test: Experiment | None
    evidence: Evidence

    def to_dict(self) -> dict[str, Json]:
        """Return JSON-ready values by name."""
        evidence, test = self.evidence, self.next_test
        return {
            "verdict": self.verdict,
            "causes": [ranked.to_dict() for ranked in self.causes],
            "next_test": None
            if test is None
            else {"name": test.name, "how": test.how, "minutes": test.minutes},
            "attribution": None if self.attribution is None else self.attribution.to_dict(),
            "evidence": {fact.name: fact.to_dict() for fact in evidence},
            "disagreements": [{"fact": f.name, **f.to_dict()} for f in evidence.disagreements],
            "sources": [reading.to_dict() for reading in evidence.readings],
        }


def diagnose(evidence: Evidence, costs: CostTable | None = None) -> Diagnosis:
    """Derive facts, attribute the time, score all causes and predict the gains of remedies.

    Every figure of the result is a fact of the evidence: readers add those that a source states,
    `derive`, `_add_gap_shares` and `add_predictions` those that follow.

    Args:
        evidence: facts of all sources; derived facts are added to it.
        costs: a measured cost table, for predictions at other K.
    """
    derive(evidence)
    attribution = attribute(evidence)
    outlook: Outlook | None = None
    if attribution is not None:
        _add_gap_shares(evidence, attribution)
        outlook = outlook_of(evidence, attribution, costs)
        add_predictions(evidence, attribution, outlook)
    _add_symptoms(evidence)
    scored = score_causes(evidence, CAUSES.values())
    supported = [item for item in scored if item.is_supported]
    verdict = verdict_of(supported, evidence)
    named = {
        "problem": [item for item in scored if item.reaches(MIN_ALSO)],
        "healthy": supported,
        "insufficient evidence": [],
    }[verdict]
    causes = tuple(
        RankedCause(
            scored=item,
            next_test=experiment_for(item.cause, evidence),
            changes=changes_of(item, evidence, attribution, outlook),
        )
        for item in named[:MAX_CAUSES]
    )
    weights = {item.cause.label: item.score for item in scored}
    return Diagnosis(
        verdict=verdict,
        attribution=attribution,
        causes=causes,
        next_test=best_experiment(weights, CAUSES.values(), evidence),
        evidence=evidence,
    )


def _add_gap_shares(evidence: Evidence, found: Attribution) -> None:
    for kind in ("rejection", "draft", "verify", "overhead"):
        evidence.note(f"gap_share_{kind}", found.share(kind), "attribution of the time per token")


MIN_SYMPTOM = 1.0
"""Weight of a fact against health, in nats, from which on it is a symptom."""
MEASURED = ("acceptance_length", "draft_acceptance_rate", "speedup", "replay_ratio")
"""Without any of these facts nothing is known of how speculation does."""


def _add_symptoms(evidence: Evidence) -> None:
    """Add whether any fact says that something is wrong, if how speculation does was measured."""
    if not any(name in evidence for name in MEASURED):
        return
    found = [sign.finding(evidence) for sign in CAUSES["healthy"].signs]
    seen = [f.fact.name for f in found if f is not None and f.weight <= -MIN_SYMPTOM]
    evidence.note("symptom_seen", bool(seen), ", ".join(seen) or "no fact speaks against health")


MIN_SCORE_WITHOUT_HARM = 0.4
MIN_TIMED_DRAFTS = 8
"""Drafts below which times show no cost, because the first steps of a process are slower."""
MIN_DRAFTS = 30
MIN_SCORE_OF_FEW = 0.6
"""Score of the likeliest cause below which few drafts, or a run as fast as plain, prove nothing."""


def verdict_of(supported: Sequence[ScoredCause], evidence: Evidence) -> Verdict:
    if not supported:
        return "insufficient evidence"
    likeliest = supported[0]
    if likeliest.cause.label == "healthy":
        return "healthy"
    speedup, drafts = evidence.number("speedup"), evidence.number("num_drafts")
    if drafts is not None and 0 < drafts < MIN_TIMED_DRAFTS and likeliest.cause.family == "cost":
        return "insufficient evidence"
    if speedup is not None and NO_GAIN[0] <= speedup <= NO_GAIN[1]:
        least = MIN_SCORE_WITHOUT_HARM
    elif drafts is not None and 0 < drafts < MIN_DRAFTS:
        least = MIN_SCORE_OF_FEW
    else:
        return "problem"
    return "problem" if likeliest.score >= least else "insufficient evidence"


def changes_of(
    item: ScoredCause, evidence: Evidence, found: Attribution | None, outlook: Outlook | None
) -> tuple[Change, ...]:
    """Return the remedies of a cause, in descending order of predicted gain."""
    changes = [
        Change(remedy=remedy, prediction=predict(remedy.effect, evidence, found, outlook))
        for remedy in item.cause.remedies
    ]
    return tuple(
        sorted(changes, key=lambda change: -(change.prediction.gain if change.prediction else 0.0))
    )
