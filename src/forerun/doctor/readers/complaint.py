"""Reads a complaint in words, by the rules of `tables/symptoms.txt`.

A sentence becomes a fact only where all elements of a rule are in it, what is said is said of the
rule's subject in one clause, and nothing makes it a guess. What is less sure is kept with its
sentence, to be asked about.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from forerun.client.urls import hide_urls
from forerun.doctor.evidence import FACTS, FOLDER, SETTING, WROTE, Evidence, Fact, Reading, Value
from forerun.errors import InvalidRequest

MAX_COMPLAINT = 4000
"""Most characters of a complaint."""
MAX_SENTENCE = 400
"""Characters of a sentence that are searched: matching takes time in proportion to its square."""
SOON = 40
"""Most characters between what is said and a subject that follows it."""
SENTENCES = re.compile(r"(?<=[.!?])\s+|\n+")
CLAUSES = re.compile(
    r"[;:(]|, (?:but|and|so|yet|with) |\b(?:while|whereas|although|though|despite|but|because)\b"
)
BUT = re.compile(r"\b(?:but|while|whereas|although|though)\b", re.IGNORECASE)
GUESS = re.compile(
    r"\b(?:should|would|could|may|might|perhaps|probably|whether|wonder\w*|want\w*|"
    r"supposed|in place of|rather than|far from|anything but|doubt\w*|hardly any|no ?body|"
    r"used to be|fixed it|docs? says?)\b|^(?!.*\bwhy\b).*\?$",
    re.IGNORECASE,
)
NEGATION = re.compile(
    r"\b(?:not|never|no|cannot|nor|neither)(?: \w+){0,2} ?$|\bwithout (?:an?|any)? ?$|"
    r"n['o]t(?: \w+)? ?$",
    re.IGNORECASE,
)
WORDS_OF_NUMBERS = re.compile(
    r"\b(one|two|three|four|five|six|seven|eight|nine|ten|twelve|sixteen)\b", re.IGNORECASE
)
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
NUMBERS = dict(
    one="1", two="2", three="3", four="4", five="5", six="6", seven="7", eight="8", nine="9",
    ten="10", twelve="12", sixteen="16",
)  # fmt: skip


class Rule:
    """One line of a table: facts, and the patterns that state them.

    Attributes:
        facts: names, each with a value or the group of a pattern that has it; "" is a yes.
        is_guess: whether it is never sure.
        subject: what the first pattern must be said of; None for any.
        absent: a pattern that the sentence must not have.
    """

    def __init__(self, facts: str, elements: str) -> None:
        self.is_guess = facts.startswith("?")
        entries = facts.removeprefix("?").split(",")
        self.facts = [entry.partition("=")[::2] for entry in entries]
        first, *others = elements.split(" & ")
        subject, is_of, said = first.rpartition(" > ")
        self.subject = re.compile(subject, re.IGNORECASE) if is_of else None
        self.said = re.compile(said, re.IGNORECASE)
        wanted = [other for other in others if not other.startswith("!")]
        absent = [other[1:] for other in others if other.startswith("!")]
        self.conditions = [re.compile(each, re.IGNORECASE) for each in wanted]
        self.absent = re.compile("|".join(absent), re.IGNORECASE) if absent else None

    def holds(self, line: str) -> bool:
        """Whether a line of a log has every pattern."""
        return all(each.search(line) for each in (self.said, *self.conditions))

    def statements(self, sentence: str) -> Iterator[tuple[str, Value, bool]]:
        """Yield what a sentence states by this rule: fact, value, and whether that is sure."""
        if self.absent is not None and self.absent.search(sentence):
            return
        if not all(each.search(sentence) for each in self.conditions):
            return
        for start, end in split_clauses(sentence):
            clause = sentence[start:end]
            for match in self.said.finditer(
                sentence, start, end if self.subject else len(sentence)
            ):
                if match.start() >= end:
                    break
                if self.subject is None or self._is_said_of_subject(
                    sentence[start:end], match, start
                ):
                    yes = not NEGATION.search(sentence[start : match.start()])
                    yield from self._values(match, yes, not GUESS.search(clause))
        if self.subject is not None and self.subject.search(sentence):
            for match in self.said.finditer(sentence):
                yield from self._values(match, True, False)

    def _is_said_of_subject(self, clause: str, match: re.Match[str], start: int) -> bool:
        """Whether the rule's subject is the nearest one before, or else soon after, a match."""
        assert self.subject is not None
        own = [found.span() for found in self.subject.finditer(clause)]
        every = own + [found.span() for found in any_subject().finditer(clause)]
        if before := [span for span in every if span[0] <= match.start() - start]:
            last = max(before)
            return any(span[0] <= last[0] and span[1] >= last[1] for span in own)
        return bool(own) and min(own) <= min(every) and min(own)[0] - match.end() + start < SOON

    def _values(
        self, match: re.Match[str], yes: bool, sure: bool
    ) -> Iterator[tuple[str, Value, bool]]:
        groups = [group for group in match.groups() if group is not None]
        for name, value in self.facts:
            sure = not self.is_guess and (sure or name in SETTING)
            if not value:
                yield name, yes, sure
            elif "\\" not in value:
                if yes:
                    yield name, value, sure
            elif yes and (number := number_of(value, groups)) is not None:
                yield name, number, sure


def number_of(form: str, groups: list[str]) -> float | None:
    r"""Return the number that a form such as `-\1%` makes of the groups of a match."""
    sign, _, rest = form.partition("\\")
    place, unit = int(rest[0]), rest[1:]
    if len(groups) < place:
        return None
    number = float(groups[place - 1]) * {"": 1.0, "%": 0.01, "k": 1000.0}[unit]
    return {"": number, "+": 1.0 + number, "-": 1.0 - number}[sign]


def split_clauses(sentence: str) -> list[tuple[int, int]]:
    """Return the start and end of every clause."""
    starts = [0, *(found.start() for found in CLAUSES.finditer(sentence))]
    return list(zip(starts, [*starts[1:], len(sentence)], strict=True))


@cache
def rules(table: str) -> tuple[Rule, ...]:
    """Return the rules of a table of words."""
    return tuple(Rule(facts, elements) for facts, elements in _lines(table)[0])


@cache
def any_subject() -> re.Pattern[str]:
    return re.compile(_lines("symptoms")[1]["SUBJECTS"], re.IGNORECASE)


def _lines(table: str) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Return the lines of a table, macros filled in, and its macros."""
    macros: dict[str, str] = {}
    found = []

    def fill(text: str) -> str:
        return re.sub(r"<([A-Z]+)>", lambda name: f"(?:{macros[name.group(1)]})", text)

    for line in (FOLDER / f"{table}.txt").read_text("utf-8").splitlines():
        facts, tab, elements = line.partition("\t")
        if tab:
            found.append((facts, fill(elements)))
        elif line and not line.startswith("#"):
            name, _, value = line.partition(" = ")
            macros[name] = fill(value)
    return found, macros


def read_complaint(text: str) -> Evidence:
    """Return what a complaint states, what it may mean, and the sentences that say nothing."""
    if len(text) > MAX_COMPLAINT:
        raise InvalidRequest(f"a complaint in words may have at most {MAX_COMPLAINT} characters")
    evidence = Evidence(readings=[Reading(source="the complaint", kinds={"words"}, num_lines=1)])
    sure: dict[str, dict[Value, str]] = {}
    for sentence in SENTENCES.split(hide_urls(text)):
        short = sentence.strip()[:MAX_SENTENCE]
        plain = WORDS_OF_NUMBERS.sub(
            lambda word: NUMBERS[word[0].lower()], THOUSANDS.sub("", short)
        )
        stated = [entry for rule in rules("symptoms") for entry in rule.statements(plain)]
        if short and not _is_understood(short, stated):
            evidence.readings[0].unread.append(short)
        for name, value, is_sure in stated:
            if is_sure:
                sure.setdefault(name, {}).setdefault(value, short)
            else:
                evidence.suppose(Fact(name=name, value=value, source=f"{WROTE}{short}"))
    _keep_sure(evidence, sure)
    if " " not in text.strip() and not (evidence.facts or evidence.supposed):
        raise InvalidRequest(
            f"{hide_urls(text)[:60]!r} is no file, and no complaint; say in a sentence what is "
            "low, slow or wrong and what it depends on, or give --observed NAME"
        )
    return evidence


def _is_understood(sentence: str, stated: list[tuple[str, Value, bool]]) -> bool:
    """Whether a sentence surely states a symptom, or figures without a contrast to others."""
    sure = [value for name, value, is_sure in stated if is_sure and name not in SETTING]
    return any(isinstance(value, bool) for value in sure) or bool(sure and not BUT.search(sentence))


def _keep_sure(evidence: Evidence, sure: dict[str, dict[Value, str]]) -> None:
    """Add facts that were stated once, or several times alike; a contradiction is asked about."""
    if True in sure.get("acceptance_fine", {}) and True in sure.get("acceptance_low", {}):
        del sure["acceptance_fine"]  # it is fine elsewhere, which is what makes it a complaint
    for name, values in sure.items():
        (value, sentence), *others = values.items()
        source = f"{WROTE}{sentence}"
        if FACTS[name].type == "words":
            evidence.note(name, sorted(map(str, values)), source)
        elif others:
            evidence.suppose(Fact(name=name, value=value, source=source))
        else:
            evidence.note(name, value, source)
