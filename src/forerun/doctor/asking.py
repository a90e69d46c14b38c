"""Chooses the question whose answer is expected to tell the most about the cause."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from forerun.doctor.diagnosis import (
    ANY_OTHER,
    CAUSES,
    EXPERIMENTS,
    ScoredCause,
    diagnose,
    score_causes,
)
from forerun.doctor.evidence import FACTS, GROUPS, Evidence, merge, shown
from forerun.errors import InvalidRequest
from forerun.theory.record import Json

MAX_ANSWERS = 30
MAX_UNKNOWN = 10
"""Number of consecutive answers "unknown" after which nothing more is asked."""
MAX_ITEMS = 5
"""Most observations that one question asks about."""
SURE = 0.95
"""Probability of the first cause from which on nothing more is asked: benchmarks/real-cases says
how often it is right there."""
_BASE_RATE = 0.08
"""Probability of an observation under a cause that neither supports nor contradicts it."""
_MINUTES_TO_ANSWER = 20.0
"""Cost of one more question, in minutes, beside the experiment that answers it."""
_KNOWN_INSIDE = 0.4
"""Probability that an operator can answer a question about the inside of an engine."""
_OPENING = (
    *("acceptance_low", "slower_than_plain", "no_gain", "output_differs", "output_corrupt"),
    "tools_disagree",
)
"""Observations that are asked about first if the complaint names no topic."""
_LEAST = 0.005
"""Expected information, in nats, below which no question is asked."""
_UNSHOWN = 1.5
"""Log-probability, in nats, that a cause loses if it explains no topic of the complaint."""
_SHOWS = 1.0
"""Least weight, in nats, of an observation that a cause is said to explain."""
_TOGETHER = 3
"""Number of open observations whose joint answers decide whether asking ends."""
_LEAST_CHANGE = 0.02
"""Asking ends if their answers change the likeliest cause with less than this probability."""
_WORDS: Mapping[object, bool | None] = {
    **dict.fromkeys(("y", "yes", "true", True), True),
    **dict.fromkeys(("n", "no", "false", False), False),
    **dict.fromkeys(("u", "unknown", "?", "", None), None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """An observation that is asked about, with yes, no or unknown as its answer.

    Attributes:
        fact: name of the observation.
        text: its definition.
        information: expected information about the cause, in nats.
        minutes: duration of the experiment that answers it; 0 where none is needed.
        how: that experiment.
    """

    fact: str
    text: str
    information: float
    minutes: float
    how: str

    @property
    def worth(self) -> float:
        """Information per minute, by how likely an answer is."""
        known = _KNOWN_INSIDE if FACTS[self.fact].inside else 1.0
        return known * self.information / (_MINUTES_TO_ANSWER + self.minutes)

    def to_dict(self) -> dict[str, Json]:
        """Return JSON-ready values by name."""
        return {
            "fact": self.fact,
            "text": f"Does this hold: {self.text}?",
            "information": self.information,
            "minutes": self.minutes,
            "how": self.how,
            "answers": ["yes", "no", "unknown"],
        }


def read_answer(word: object) -> bool | None:
    """Return an answer as true, false, or None for not known.

    Raises:
        InvalidRequest: it is none of these.
    """
    key = word.strip().lower() if isinstance(word, str) else word
    if not isinstance(key, str | bool | None) or key not in _WORDS:
        raise InvalidRequest(f"{shown(word)} is no answer; answer yes, no or unknown")
    return _WORDS[key]


def read_answers(text: str, number: int) -> tuple[bool | None, ...]:
    """Return a line's answers about so many observations; a single one counts for all.

    Raises:
        InvalidRequest: a word is no answer, or there are too many or too few.
    """
    found = [read_answer(word) for word in text.replace(",", " ").split() or [""]]
    if len(found) not in (1, number):
        raise InvalidRequest(f"{len(found)} answers to {number} observations; give one for each")
    return tuple(found * number if len(found) == 1 else found)


def with_answers(evidence: Evidence, answers: Mapping[str, bool | None]) -> Evidence:
    """Return a copy of the evidence with the answers and all facts that follow.

    Raises:
        InvalidRequest: an answer is about no observation.
    """
    found = merge(evidence)
    for name, answer in answers.items():
        if name not in FACTS or FACTS[name].type != "flag":
            raise InvalidRequest(f"{name[:60]!r} is no observation that is asked about")
        found.add(name, answer, "answered")
    return diagnose(found).evidence


def next_question(
    evidence: Evidence, answers: Mapping[str, bool | None]
) -> tuple[Observation, ...]:
    """Return the observations to ask about together; none where asking should end.

    The first one has the most information per cost, the others are the next best ones of its group.

    Args:
        evidence: with the answers and all facts that follow (`with_answers`).
        answers: what was asked so far, in order; None where the answer was "unknown".
    """
    given = list(answers.values())
    if len(given) >= MAX_ANSWERS or given[-MAX_UNKNOWN:] == [None] * MAX_UNKNOWN:
        return ()
    shares = _probabilities(evidence)
    scored = score_causes(evidence, CAUSES.values())
    first = scored[0]
    if shares[first.cause.label] >= SURE:
        return ()
    opening = [name for name in _OPENING if name not in evidence and name not in answers]
    if opening and not answers and not _topics_of(evidence):
        return tuple(_observation(shares, name) for name in opening)
    found = [
        _observation(shares, name)
        for name in _ASKED
        if name not in evidence and name not in answers
    ]
    found = [item for item in found if item.information >= _LEAST]
    found.sort(key=lambda item: -item.worth)
    if not found or (
        first.is_supported and _chance_of_change(evidence, shares, scored, found) < _LEAST_CHANGE
    ):
        return ()
    group = _GROUP_OF[found[0].fact]
    return tuple(item for item in found if _GROUP_OF[item.fact] == group)[:MAX_ITEMS]


def likeliest_causes(evidence: Evidence) -> tuple[ScoredCause, ...]:
    """Return the three likeliest causes, those with support first, then those without any."""
    shares = _probabilities(evidence)
    scored = score_causes(evidence, CAUSES.values())
    unsupported = sorted(
        (item for item in scored if not item.is_supported),
        key=lambda item: -shares[item.cause.label],
    )
    return (*(item for item in scored if item.is_supported), *unsupported)[:3]


_MOVES: Mapping[str, Mapping[str, float]] = {
    fact.name: {
        cause.label: sign.yes - sign.no
        for cause in CAUSES.values()
        for sign in cause.signs
        if sign.fact == fact.name
    }
    for fact in FACTS.values()
    if fact.type == "flag"
}
"""Log-likelihood ratio of yes over no, in nats, by observation and cause."""
_TOPICS = {
    topic: tuple(kind.name for kind in GROUPS[topic] if kind.type == "flag")
    for topic in ("acceptance", "output", "cost")
}
"""Topics of complaints, with the observations that belong to each."""
_SHOWN_IN = {
    label: {
        topic
        for topic, facts in _TOPICS.items()
        if any(_MOVES[fact].get(label, 0.0) >= _SHOWS for fact in facts)
    }
    for label in CAUSES
}
"""Topics, by cause, of the observations that the cause explains."""
_GROUP_OF = {kind.name: name for name, group in GROUPS.items() for kind in group}
_ASKED = tuple(
    name for name, moves in _MOVES.items() if name != "symptom_seen" and set(moves) - {"healthy"}
)


def _probabilities(evidence: Evidence) -> dict[str, float]:
    """Return the probability of every cause; what is missing to 1 is that of unlisted causes.

    Unlike scores, they do not lower the share of a cause for which there is no evidence yet.
    """
    complaint = _topics_of(evidence)
    logs = {}
    for cause in CAUSES.values():
        findings = [sign.finding(evidence) for sign in cause.signs]
        logs[cause.label] = cause.prior + sum(f.weight for f in findings if f is not None)
        if complaint and complaint.isdisjoint(_SHOWN_IN[cause.label]):
            logs[cause.label] -= _UNSHOWN
        if evidence.flag("acceptance_low") is False and _SHOWN_IN[cause.label] == {"acceptance"}:
            logs[cause.label] -= _UNSHOWN
    highest = max(logs.values())
    shares = {label: math.exp(log - highest) for label, log in logs.items()}
    total = sum(shares.values()) + math.exp(ANY_OTHER - highest)
    return {label: share / total for label, share in shares.items()}


def _topics_of(evidence: Evidence) -> set[str]:
    return {name for name, facts in _TOPICS.items() if any(map(evidence.flag, facts))}


def _observation(shares: Mapping[str, float], fact: str) -> Observation:
    tests = [item for item in EXPERIMENTS if fact in item.yields]
    test = min(tests, key=lambda item: item.minutes, default=None)
    return Observation(
        fact=fact,
        text=FACTS[fact].definition,
        information=_information(shares, fact),
        minutes=0.0 if test is None else test.minutes,
        how="" if test is None else test.how,
    )


def _chance(shares: Mapping[str, float], fact: str) -> float:
    odds = _BASE_RATE / (1.0 - _BASE_RATE)
    return _BASE_RATE + sum(
        shares[label] * (1.0 / (1.0 + math.exp(-move) / odds) - _BASE_RATE)
        for label, move in _MOVES[fact].items()
    )


def _information(shares: Mapping[str, float], fact: str) -> float:
    odds = _BASE_RATE / (1.0 - _BASE_RATE)
    parts = [
        (shares[label], 1.0 / (1.0 + math.exp(-move) / odds))
        for label, move in _MOVES[fact].items()
    ]
    parts.append((1.0 - sum(share for share, _ in parts), _BASE_RATE))
    mean = sum(share * yes for share, yes in parts)
    return _entropy(mean) - sum(share * _entropy(yes) for share, yes in parts)


def _entropy(probability: float) -> float:
    return -sum(p * math.log(p) for p in (probability, 1.0 - probability) if p > 0.0)


def _chance_of_change(
    evidence: Evidence,
    shares: Mapping[str, float],
    scored: tuple[ScoredCause, ...],
    items: list[Observation],
) -> float:
    chances = {item.fact: _chance(shares, item.fact) for item in items[:_TOGETHER]}
    total = 0.0
    for answers in itertools.product((True, False), repeat=len(chances)):
        supposed = Evidence(facts=dict(evidence.facts))
        chance = 1.0
        for (name, yes), answer in zip(chances.items(), answers, strict=True):
            supposed.add(name, answer, "supposed")
            chance *= yes if answer else 1.0 - yes
        if score_causes(supposed, CAUSES.values())[0].cause.label != scored[0].cause.label:
            total += chance
    return total
