"""Evidence of a diagnosis: named facts with a source and, if known, an interval."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import msgspec

from forerun.errors import InvalidRequest
from forerun.theory.intervals import Interval
from forerun.theory.record import Json

FOLDER = Path(__file__).with_name("tables")


def load_table(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text("utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FactKind:
    """Definition of a fact: its name, type, unit and bounds.

    Attributes:
        type: number, list of numbers, yes or no, word, or list of words.
        definition: what it is; readers convert figures that an engine defines otherwise.
        inside: whether it takes a look into engine, draft or benchmark, so that few know it.
    """

    name: str
    type: Literal["number", "numbers", "flag", "word", "words"]
    definition: str
    unit: str = ""
    low: float = 0.0
    high: float | None = None
    choices: tuple[str, ...] = ()
    inside: bool = False


GROUPS: Mapping[str, tuple[FactKind, ...]] = {
    group: tuple(msgspec.convert({"name": n, **entry}, FactKind) for n, entry in entries.items())
    for group, entries in load_table("facts").items()
}
FACTS: Mapping[str, FactKind] = {kind.name: kind for group in GROUPS.values() for kind in group}
FORMER_NAMES: Mapping[str, str] = {
    former: name
    for group in load_table("facts").values()
    for name, entry in group.items()
    for former in entry.get("former", ())
}
"""Names in facts files of earlier versions."""


Value = bool | float | str | tuple[float, ...] | tuple[str, ...]

COUNTS = frozenset(
    {"num_drafts", "num_drafted", "num_accepted", "accepted_per_position", "drafted_per_position"}
)
"""Counts that belong together: those of two sources make no rate."""
MAX_WORD = 200
"""Characters of the longest word."""
MAX_NUMBER = 1e15
"""Largest number of a fact without a limit of its own: counts are exact up to here."""
MAX_SIMILAR = 8
"""Facts that an unknown name is answered with."""
MAX_LIST = 4096
"""Entries of the longest list: positions of the deepest draft that a trace may hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A known value of one kind of fact, with its source and interval."""

    name: str
    value: Value
    source: str
    interval: Interval | None = None

    @property
    def definition(self) -> str:
        return FACTS[self.name].definition

    def to_dict(self) -> dict[str, Json]:
        ends: Json = None if self.interval is None else (self.interval.low, self.interval.high)
        return {
            "value": list(self.value) if isinstance(self.value, tuple) else self.value,
            "definition": self.definition,
            "unit": FACTS[self.name].unit,
            "source": self.source,
            "interval": ends,
        }


@dataclass(slots=True, kw_only=True)
class Reading:
    """Format and completeness of one source that was read."""

    source: str
    kinds: set[str] = field(default_factory=set)
    num_lines: int = 0
    num_unknown: int = 0
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Json]:
        return asdict(self) | {"kinds": tuple(sorted(self.kinds)), "notes": tuple(self.notes)}


Points = tuple[tuple[str | float, float, float], ...]
"""A place (a time, a tag, a K), a value there, and how many steps are behind it."""


@dataclass(slots=True, kw_only=True)
class Evidence:
    """All known facts about a run, one per name, with a record of the sources read.

    The first value of a fact stays: sources are read in the order of trust, and a second value that
    differs is kept as a disagreement. `add` raises an error at an impossible value, for sources
    that a person can correct; `note` leaves such a value out with a note, for figures that
    were counted or calculated. The page and the JSON list every fact with its `source`; the
    terminal prints with its source each fact that counts for or against a listed cause.

    Attributes:
        disagreements: facts that lost against one of another value.
        series: figures over time, by tag and by K, for the report.
        notes: figures of impossible values, which were left out.
    """

    facts: dict[str, Fact] = field(default_factory=dict)
    disagreements: list[Fact] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    series: dict[str, Points] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, value: object, source: str, interval: Interval | None = None) -> None:
        """Add a fact; a value of None is ignored."""
        if value is None:
            return
        name = FORMER_NAMES.get(name, name)
        fact = Fact(name=name, value=_checked_value(name, value), source=source, interval=interval)
        known = self.facts.setdefault(name, fact)
        if known is not fact and not alike(known.value, fact.value):
            self.disagreements.append(fact)

    def note(self, name: str, value: object, source: str, interval: Interval | None = None) -> None:
        """Add a fact like `add`, but record a value out of range as a note and leave it out."""
        try:
            self.add(name, value, source, interval)
        except ValueError as error:
            self.notes.append(f"not used: {error} ({source})")

    def include(self, other: Evidence) -> None:
        """Add the facts of another source, except facts that are already known."""
        is_counted = not COUNTS.isdisjoint(self.facts)
        for fact in other.facts.values():
            if is_counted and fact.name in COUNTS:
                continue
            known = self.facts.setdefault(fact.name, fact)
            if known is not fact and not alike(known.value, fact.value):
                self.disagreements.append(fact)
        self.disagreements += other.disagreements
        self.readings += other.readings
        self.notes += other.notes
        self.series = other.series | self.series

    def check_counts(self) -> None:
        """Refuse counts that cannot be of one run."""
        accepted, drafted = self.number("num_accepted"), self.number("num_drafted")
        if accepted is not None and drafted is not None and accepted > drafted:
            source = self.facts["num_accepted"].source
            raise InvalidRequest(
                f"{accepted:g} accepted of {drafted:g} drafted tokens ({source}): give counts of "
                "one period, accepted ones without the bonus token"
            )

    def number(self, name: str) -> float | None:
        """Return the value of a number; None where it is not known."""
        value = self._value(name)
        return float(value) if isinstance(value, int | float) else None

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return the values of a list of numbers; empty where they are not known."""
        value = self._value(name)
        if not isinstance(value, tuple):
            return ()
        return tuple(float(entry) for entry in value if not isinstance(entry, str))

    def flag(self, name: str) -> bool | None:
        """Return the value of a flag; None where it was not observed."""
        value = self._value(name)
        return value if isinstance(value, bool) else None

    def words(self, name: str) -> tuple[str, ...]:
        """Return the values of a fact that is one word or several; empty if it is not known."""
        value = self._value(name)
        if isinstance(value, str):
            return (value,)
        return tuple(map(str, value)) if isinstance(value, tuple) else ()

    def __contains__(self, name: str) -> bool:
        return name in self.facts

    def __iter__(self) -> Iterator[Fact]:
        return iter(self.facts.values())

    def _value(self, name: str) -> Value | None:
        if name not in FACTS:
            raise KeyError(f"{name} is no fact")
        fact = self.facts.get(name)
        return None if fact is None else fact.value


def _checked_value(name: str, value: object) -> Value:
    """Check a value against the definition of its fact and convert it."""
    kind = FACTS.get(name)
    if kind is None:
        raise ValueError(f"there is no fact {name[:MAX_WORD]!r}; {_similar_facts(name)}")
    if kind.type == "flag":
        return _checked_flag(name, value)
    if kind.type == "number":
        return checked_number(name, value)
    if kind.type == "word":
        return _checked_word(name, value)
    entries = value if isinstance(value, list | tuple) else [value]
    if len(entries) > MAX_LIST:
        raise ValueError(f"{name} has {len(entries)} entries; at most {MAX_LIST} are read")
    if kind.type == "numbers":
        return tuple(checked_number(name, entry) for entry in entries)
    return tuple(_checked_word(name, entry) for entry in entries)


def _similar_facts(name: str) -> str:
    words = {word for word in name.lower().split("_") if len(word) > 3}
    near = get_close_matches(name.lower(), FACTS, n=4, cutoff=0.6)
    near += [known for known in FACTS if any(w[:4] in known for w in words) and known not in near]
    if near:
        return f"did you mean {', '.join(near[:MAX_SIMILAR])}?"
    flags = [kind.name for kind in FACTS.values() if kind.type == "flag"]
    return f"docs/diagnose.md lists all of them; observations are {', '.join(sorted(flags))}"


def shown(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    if isinstance(value, str | int | float | None):
        return repr(value[:60]) if isinstance(value, str) else repr(value)
    return f"a value of type {type(value).__name__}"


def _checked_flag(name: str, value: object) -> bool:
    known: Mapping[object, bool] = {"yes": True, "true": True, "no": False, "false": False}
    found = known.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(found, bool):
        raise ValueError(f"{name} is {shown(value)}; it must be yes or no")
    return found


def checked_number(name: str, value: object) -> float:
    kind = FACTS[name]
    try:
        found = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]  # refused below
    except (OverflowError, TypeError, ValueError):
        found = math.nan
    high = MAX_NUMBER if kind.high is None else kind.high
    if not kind.low <= found <= high:  # NaN is not
        raise ValueError(
            f"{name} is {shown(value)}; it must be a number from {kind.low:g} to {high:g}"
        )
    return found


def _checked_word(name: str, value: object) -> str:
    """Check a short text, which must be one of the fact's choices if it has any."""
    kind = FACTS[name]
    if not isinstance(value, str) or len(value) > MAX_WORD:
        raise ValueError(f"{name} must be a text of at most {MAX_WORD} characters")
    if kind.choices and value not in kind.choices:
        raise ValueError(f"{name} is {shown(value)}; it must be one of {', '.join(kind.choices)}")
    return value


def alike(one: Value, other: Value) -> bool:
    """Whether two values of a fact agree; numbers may differ by 2%."""
    if isinstance(one, bool | str) or isinstance(other, bool | str):
        return one == other
    ones = one if isinstance(one, tuple) else (one,)
    others = other if isinstance(other, tuple) else (other,)
    return len(ones) == len(others) and all(map(same, ones, others))


def same(one: float | str, other: float | str) -> bool:
    """Whether two list entries are equal; numbers may differ by 2%."""
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return math.isclose(one, other, rel_tol=0.02)
