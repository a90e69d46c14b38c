"""Chooses what to ask a person next: what tells the most of what they are likely to know.

A question is about one fact, in plain words, with how to find out; numbers that belong to it are
asked for beside it. What was read from a complaint, or may be meant by it, is asked about where it
decides. Asking ends where answers would hardly change the advice, or after eight questions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from forerun.doctor.diagnosis import (
    CAUSES,
    EXPERIMENTS,
    ScoredCause,
    diagnose,
    score_causes,
)
from forerun.doctor.evidence import (
    FACTS,
    GROUPS,
    SETTING,
    Evidence,
    Value,
    check_value,
    merge,
    shown,
)
from forerun.errors import InvalidRequest
from forerun.theory.record import Json

MAX_QUESTIONS = 8
MAX_ITEMS = 4
"""Most observations of one screen; numbers may be asked for beside them."""
_ALSO_WORTH = 0.3
"""Share of the best observation's worth from which on another one is on its screen."""
SURE = 0.95
"""Probability of the first cause from which on nothing more is asked."""
_KNOWN = {"user": 0.6, "operator": 0.25, "developer": 0.06}
"""Probability that a person can answer, by who knows it most often."""
_KNOWN_TO_WRITER = 0.9
"""The same of what the person's own sentence means."""
_BASE_RATE = 0.08
"""Probability of an observation under a cause that neither supports nor contradicts it."""
_MINUTES_TO_ANSWER = 20.0
"""Cost of one more question, in minutes, beside the experiment that answers it."""
_OPENING = (
    *("acceptance_low", "slower_than_plain", "slowed_down", "output_differs", "output_corrupt"),
    "tools_disagree",
)
"""Observations that are asked about first, on one screen, if the complaint names no topic."""
_LEAST = 0.002
"""Expected information of what a person may know, in nats, below which no question is asked."""
_UNSHOWN = 1.5
"""Log-probability, in nats, that a cause loses if it explains no topic of the complaint."""
_SHOWS = 1.0
"""Least weight, in nats, of an observation that a cause is said to explain."""
_BEST = 3
"""Number of open observations whose answers decide whether asking ends."""
_LEAST_CHANGE = 0.01
"""Asking ends if their answers change the likeliest cause with less than this probability, times
the number of questions before."""
_WORDS: Mapping[object, bool | None] = {
    **dict.fromkeys(("y", "yes", "true", True), True),
    **dict.fromkeys(("n", "no", "false", False), False),
    **dict.fromkeys(("u", "unknown", "?", "", None), None),
}

Answer = Value | None
"""A value of a fact, yes or no to what was read from words, or None for not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A fact that is asked about.

    Attributes:
        fact: its name.
        text: the question in plain words.
        information: expected information about the cause, in nats; 0 of a number beside it.
        minutes: duration of the experiment that answers it; 0 where none is needed.
        how: that experiment.
        wrote: the sentence that seems to state it; "" where none does.
    """

    fact: str
    text: str
    information: float = 0.0
    minutes: float = 0.0
    how: str = ""
    wrote: str = ""

    @property
    def answers(self) -> tuple[str, ...]:
        """What may be answered; empty for a number."""
        kind = FACTS[self.fact]
        return ("yes", "no") if kind.type == "flag" or self.wrote else kind.choices

    def to_dict(self) -> dict[str, Json]:
        """Return JSON-ready values by name."""
        return asdict(self) | {"answers": [*self.answers, "unknown"]}


def read_answer(fact: str, word: object) -> Answer:
    """Return the answer about a fact; None for not known.

    Raises:
        InvalidRequest: it is no answer, or about no fact that is asked about.
    """
    if fact not in FACTS:
        raise InvalidRequest(f"{fact[:60]!r} is no observation or figure that is asked about")
    key = word.strip().lower() if isinstance(word, str) else word
    if isinstance(key, str | bool | None) and key in _WORDS:
        return _WORDS[key]
    kind = FACTS[fact].type
    if kind == "flag":
        raise InvalidRequest(f"{shown(word)} is no answer; answer yes, no or unknown")
    is_list = kind in ("words", "numbers") and isinstance(word, str)
    try:
        return check_value(fact, str(word).replace(",", " ").split() if is_list else word)
    except ValueError as error:
        raise InvalidRequest(f"{error}; or answer unknown") from error


def with_answers(evidence: Evidence, answers: Mapping[str, Answer]) -> Evidence:
    """Return a copy of the evidence with the answers, which go before what was read from words."""
    found = Evidence()
    for name, answer in answers.items():
        fact = evidence.facts.get(name, evidence.supposed.get(name))
        if FACTS[name].type == "flag" or not isinstance(answer, bool):
            found.note(name, answer, "answered")
        elif answer and fact is not None:  # yes, the sentence states this number
            found.note(name, fact.value, "answered")
    known = merge(evidence)
    for name, answer in answers.items():
        if answer is not None:
            known.facts.pop(name, None)
            known.supposed.pop(name, None)
    together = merge(found, known)
    if {"acceptance_length", "k"} & found.facts.keys():
        together.check_counts()
    return together


def next_question(
    evidence: Evidence, answers: Mapping[str, Answer]
) -> tuple[int, tuple[Item, ...]]:
    """Return how many questions were answered and what to ask on the next screen, if anything.

    Asking depends on nothing but its arguments: the questions before are asked again from the
    answers.

    Args:
        evidence: without the answers.
        answers: of all questions so far; None where the answer was "unknown".
    """
    given: dict[str, Answer] = {}
    for number in range(MAX_QUESTIONS):
        known = diagnose(with_answers(evidence, given)).evidence
        question = _choose_question(known, given, number)
        still_open = tuple(item for item in question if item.fact not in answers)
        if still_open or not question:
            return number, still_open
        given |= {item.fact: answers[item.fact] for item in question}
    return MAX_QUESTIONS, ()


def _choose_question(
    evidence: Evidence, answers: Mapping[str, Answer], number: int
) -> tuple[Item, ...]:
    """Return the items of the best question; none where asking should end."""
    scored = score_causes(evidence, CAUSES.values())
    shares, first = _probabilities(evidence, scored), scored[0]
    is_understood = evidence.supposed or _has_symptom(evidence) or first.is_supported
    if not answers and not is_understood:
        opening = [name for name in _OPENING if name not in evidence]
        return tuple(_item(evidence, shares, name) for name in opening)
    if decisive := _decisive_words(evidence, answers):
        return (decisive,)
    if shares[first.cause.label] >= SURE:
        return ()
    found = [
        _item(evidence, shares, name)
        for name in _ASKED
        if name not in answers and name not in evidence
    ]
    found = [item for item in found if _chance_known(item) * item.information >= _LEAST]
    found.sort(key=_worth, reverse=True)
    best = [item for item in found if FACTS[item.fact].type == "flag"][:_BEST]
    changes = _chance_of_change(evidence, shares, best)
    if not found or (number and changes < _LEAST_CHANGE * number):
        return ()
    return _one_screen(found, evidence, answers)


def _one_screen(
    ranked: list[Item], evidence: Evidence, answers: Mapping[str, Answer]
) -> tuple[Item, ...]:
    """Return the best item, others of its group that are worth asking, and its numbers."""
    best = ranked[0]
    if FACTS[best.fact].type != "flag":
        return (best,)
    items = [
        item
        for item in ranked
        if _GROUP_OF[item.fact] == _GROUP_OF[best.fact]
        and FACTS[item.fact].type == "flag"
        and _worth(item) >= _ALSO_WORTH * _worth(best)
    ]
    beside = [n for n in FACTS[best.fact].numbers if n not in evidence and n not in answers]
    return (*items[:MAX_ITEMS], *(Item(fact=name, text=FACTS[name].ask) for name in beside))


def _has_symptom(evidence: Evidence) -> bool:
    """Whether a fact says that something is wrong."""
    found = (sign.finding(evidence) for sign in CAUSES["healthy"].signs)
    return any(each is not None and each.weight <= -_SHOWS for each in found)


def likeliest_causes(evidence: Evidence) -> tuple[ScoredCause, ...]:
    """Return the three likeliest causes, those with support first, then those without any."""
    scored = score_causes(evidence, CAUSES.values())
    shares = _probabilities(evidence, scored)
    unsupported = sorted(
        (item for item in scored if not item.is_supported),
        key=lambda item: -shares[item.cause.label],
    )
    return (*(item for item in scored if item.is_supported), *unsupported)[:3]


_MOVES: dict[str, dict[str, float]] = {}
"""Log-likelihood ratio of yes over no, in nats, by observation, or fact and word, and cause."""
for _cause in CAUSES.values():
    for _sign in _cause.signs:
        if _sign.ramp is None:
            _key = _sign.fact if _sign.word is None else f"{_sign.fact}={_sign.word}"
            _MOVES.setdefault(_key, {})[_cause.label] = _sign.yes - _sign.no
_TOPICS = {
    topic: tuple(kind.name for kind in GROUPS[topic] if kind.type == "flag")
    for topic in ("acceptance", "output", "cost")
}
"""Topics of complaints, with the observations that belong to each."""
_SHOWN_IN = {
    label: {
        topic
        for topic, facts in _TOPICS.items()
        if any(_MOVES.get(fact, {}).get(label, 0.0) >= _SHOWS for fact in facts)
    }
    for label in CAUSES
}
"""Topics, by cause, of the observations that the cause explains."""
_GROUP_OF = {kind.name: name for name, group in GROUPS.items() for kind in group}
_KEYS = {
    name: [key for key in _MOVES if key == name or key.startswith(f"{name}=")]
    for name, kind in FACTS.items()
    if kind.ask and kind.type in ("flag", "word", "words")
}
"""The moves of every fact that is asked about."""
_ASKED = [name for name, keys in _KEYS.items() if {c for key in keys for c in _MOVES[key]}]


def _probabilities(evidence: Evidence, scored: Iterable[ScoredCause]) -> dict[str, float]:
    """Return the probability of every cause; what is missing to 1 is that of unlisted causes.

    They are the scores without the penalty of a cause for which there is no evidence yet, and
    lower where a cause does not explain the topic of the complaint.
    """
    complaint, shares, other = _topics_of(evidence), dict[str, float](), 1.0
    for item in scored:
        topics = _SHOWN_IN[item.cause.label]
        is_unshown = bool(complaint) and complaint.isdisjoint(topics)
        is_denied = evidence.flag("acceptance_low") is False and topics == {"acceptance"}
        log = item.penalty - _UNSHOWN * (is_unshown + is_denied)
        shares[item.cause.label] = item.score * math.exp(log)
        other -= item.score
    total = sum(shares.values()) + other
    return {label: share / total for label, share in shares.items()}


def _topics_of(evidence: Evidence) -> set[str]:
    return {name for name, facts in _TOPICS.items() if any(map(evidence.flag, facts))}


def _decisive_words(evidence: Evidence, answers: Mapping[str, Answer]) -> Item | None:
    """Return what was read from words, or may be meant by them, that decides the first cause."""
    first = _find_likeliest(evidence)
    for name, fact in (evidence.facts | evidence.supposed).items():
        if name in answers or name in SETTING or not fact.sentence:
            continue
        other = Evidence(facts=dict(evidence.facts))
        if other.facts.pop(name, None) is None:
            if FACTS[name].type != "flag":
                continue
            other.facts[name] = fact
        if _find_likeliest(other) != first:
            return Item(fact=name, text=fact.doubt, wrote=fact.sentence)
    return None


def _find_likeliest(evidence: Evidence) -> str:
    return score_causes(evidence, CAUSES.values())[0].cause.label


def _item(evidence: Evidence, shares: Mapping[str, float], name: str) -> Item:
    tests = [item for item in EXPERIMENTS if name in item.yields]
    test = min(tests, key=lambda item: item.minutes, default=None)
    stated = evidence.supposed.get(name)
    if stated is not None and stated.value is not True:
        stated = None
    return Item(
        fact=name,
        text=stated.doubt if stated else FACTS[name].ask,
        wrote=stated.sentence if stated else "",
        information=sum(_information(shares, key) for key in _KEYS[name]),
        minutes=0.0 if test is None else test.minutes,
        how="" if test is None else test.how,
    )


def _chance_known(item: Item) -> float:
    return _KNOWN_TO_WRITER if item.wrote else _KNOWN[FACTS[item.fact].who]


def _worth(item: Item) -> float:
    """Return the information per minute of a question, by how likely an answer is."""
    return _chance_known(item) * item.information / (_MINUTES_TO_ANSWER + item.minutes)


def _chances(shares: Mapping[str, float], key: str) -> list[tuple[float, float]]:
    """Return probabilities of causes, unlisted ones last, each with that of a yes under it."""
    odds = _BASE_RATE / (1.0 - _BASE_RATE)
    parts = [
        (shares[label], 1.0 / (1.0 + math.exp(-move) / odds)) for label, move in _MOVES[key].items()
    ]
    return [*parts, (1.0 - sum(share for share, _ in parts), _BASE_RATE)]


def _information(shares: Mapping[str, float], key: str) -> float:
    parts = _chances(shares, key)
    mean = sum(share * yes for share, yes in parts)
    return _entropy(mean) - sum(share * _entropy(yes) for share, yes in parts)


def _entropy(probability: float) -> float:
    return -sum(p * math.log(p) for p in (probability, 1.0 - probability) if p > 0.0)


def _chance_of_change(
    evidence: Evidence, shares: Mapping[str, float], items: Iterable[Item]
) -> float:
    """Return the probability that an answer about one of these items changes the first cause."""
    first, total = _find_likeliest(evidence), 0.0
    for item in items:
        yes = sum(share * chance for share, chance in _chances(shares, item.fact))
        for answer, chance in ((True, yes), (False, 1.0 - yes)):
            supposed = Evidence(facts=dict(evidence.facts))
            supposed.add(item.fact, answer, "supposed")
            if _find_likeliest(supposed) != first:
                total += _chance_known(item) * chance
    return total
