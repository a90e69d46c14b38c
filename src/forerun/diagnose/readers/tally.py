"""Sums of counts and means of rates from one engine's lines, and the line reader interface."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forerun.diagnose.evidence import Evidence

MAX_POSITIONS = 64


@dataclass(slots=True)
class Mean:
    """A weighted mean of values that are added one by one."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        self.total += value * weight
        self.weight += weight

    @property
    def value(self) -> float | None:
        """The weighted mean; None if no value was added."""
        return self.total / self.weight if self.weight > 0.0 else None


@dataclass(slots=True, kw_only=True)
class Tally:
    """Sums of counts, means and facts over the lines of one engine.

    Attributes:
        facts: other values by fact name; the first value stays.
    """

    counts: dict[str, float] = field(default_factory=dict)
    per_position: list[float] = field(default_factory=list)
    means: dict[str, Mean] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def count(self, name: str, value: float) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + value

    def mean(self, name: str, value: float, weight: float = 1.0) -> None:
        self.means.setdefault(name, Mean()).add(value, weight)

    def set_fact(self, name: str, value: object) -> None:
        self.facts.setdefault(name, value)

    def positions(self, accepted: Sequence[float]) -> None:
        """Add the accepted tokens per position from one line or sample."""
        for index, value in enumerate(accepted[:MAX_POSITIONS]):
            if index == len(self.per_position):
                self.per_position.append(0.0)
            self.per_position[index] += value

    def include(self, other: Tally) -> None:
        """Add the counts, means and facts of another tally."""
        for name, value in other.counts.items():
            self.count(name, value)
        for name, mean in other.means.items():
            own = self.means.setdefault(name, Mean())
            own.total += mean.total
            own.weight += mean.weight
        for name, fact in other.facts.items():
            self.set_fact(name, fact)
        self.positions(other.per_position)

    @property
    def is_empty(self) -> bool:
        return not (self.counts or self.per_position or self.means or self.facts)

    def add_to(self, evidence: Evidence, source: str) -> None:
        """Convert the sums to facts of the evidence; impossible values are noted and left out."""
        evidence.readings[-1].notes += self.notes
        named: Mapping[str, object] = {
            **{name: round(value, 3) for name, value in self.counts.items()},
            **{name: mean.value for name, mean in self.means.items()},
            **self.facts,
        }
        for name, value in named.items():
            try:
                evidence.add(name, value, source)
            except ValueError as error:
                evidence.readings[-1].notes.append(f"not used: {error}")
        if self.per_position and self.counts.get("num_drafts"):
            drafts = self.counts["num_drafts"]
            evidence.note(
                "accepted_per_position", [min(v, drafts) for v in self.per_position], source
            )


NUMBER = r"([0-9]{1,15}(?:\.[0-9]{1,15})?(?:[eE][-+]?[0-9]{1,2})?)"
MAX_NUMBERS = 64


class LineReader:
    """Reads the lines of one format, and sums up what they state."""

    kind = ""
    """The format's name."""

    def __init__(self) -> None:
        self.tally = Tally()

    def read(self, line: str) -> bool:
        """Read one line; False if it is of another format."""
        raise NotImplementedError

    def close(self) -> None:
        """Add facts that depend on all lines, after the last line was read."""


def matched_number(pattern: re.Pattern[str], line: str) -> float | None:
    found = pattern.search(line)
    return float(found.group(1)) if found else None


def numbers_in(text: str) -> list[float]:
    return [float(value) for value in re.findall(NUMBER, text)[:MAX_NUMBERS]]


def positive(values: Mapping[str, float | None], name: str) -> float | None:
    """Return a value above 0; None otherwise."""
    value = values.get(name)
    return value if value is not None and value > 0.0 else None
