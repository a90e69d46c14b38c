"""Causes of slow or wrong speculation: evidence for and against each, and remedies.

The causes themselves are in `tables/causes.toml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from forerun.diagnose.evidence import Evidence, Fact
from forerun.diagnose.facts import FACTS
from forerun.diagnose.prediction import Effect
from forerun.diagnose.tables import load_table

__all__ = ["CAUSES", "Cause", "Finding", "Remedy", "Sign"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The weight of one fact for or against a cause.

    Attributes:
        fact: the fact.
        weight: log of how much likelier it is under this cause than without it.
    """

    fact: Fact
    weight: float

    @property
    def words(self) -> str:
        """Describe the fact in words, with its source."""
        value = self.fact.value
        if isinstance(value, bool):
            said = self.fact.definition if value else f"not: {self.fact.definition}"
        elif isinstance(value, float | int):
            unit = FACTS[self.fact.name].unit
            said = f"{self.fact.name} {value:.3g}{' ' + unit if unit else ''}"
        else:
            listed = value if isinstance(value, str) else ", ".join(map(str, value))
            said = f"{self.fact.name}: {listed}"
        return f"{said} ({self.fact.source})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """Weight of one fact for one cause, as the log of a likelihood ratio.

    Attributes:
        fact: which one.
        yes: weight where an observation is yes, or a figure is at or beyond the end of its ramp.
        no: weight where it is no, or at or before the start of the ramp.
        ramp: start and end for a figure, in between linear; the start may be the larger one.
        word: the word that counts as yes, for words.
    """

    fact: str
    yes: float
    no: float = 0.0
    ramp: tuple[float, float] | None = None
    word: str | None = None

    def finding(self, evidence: Evidence) -> Finding | None:
        """Weigh the evidence; None where the fact is not known."""
        fact = evidence.facts.get(self.fact)
        if fact is None:
            return None
        if self.word is not None:
            weight = self.yes if self.word in evidence.words(self.fact) else self.no
        elif self.ramp is not None:
            weight = self._on_ramp(fact)
        else:
            weight = self.yes if fact.value is True else self.no
        return Finding(fact=fact, weight=weight) if weight else None

    def _on_ramp(self, fact: Fact) -> float:
        """The mean over the ends and the middle of the interval, where there is one."""
        assert self.ramp is not None and isinstance(fact.value, float | int)
        points = [float(fact.value)]
        if fact.interval is not None:
            points += [fact.interval.low, fact.interval.high]
        start, end = self.ramp
        places = [min(1.0, max(0.0, (point - start) / (end - start))) for point in points]
        return self.no + (self.yes - self.no) * sum(places) / len(places)

    @property
    def spread(self) -> float:
        """Largest change of the cause's score that knowing the fact could make."""
        return abs(self.yes - self.no)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change that helps if the cause is present.

    Attributes:
        change: what to do.
        price: what it costs, and what may get worse.
        effect: what it does to a step, for the prediction.
    """

    change: str
    price: str
    effect: Effect


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One possible reason why speculation is slow, wrong, or seems so.

    Attributes:
        label: its name.
        family: which part of the system it is of.
        what: what is the matter, in one sentence.
        why: how that costs speed or exactness.
        prior: log of how common it is among complaints, against the others.
        signs: evidence for and against.
        remedies: at least two.
    """

    label: str
    family: str
    what: str
    why: str
    prior: float = 0.0
    signs: tuple[Sign, ...]
    remedies: tuple[Remedy, ...]


CAUSES: Mapping[str, Cause] = {
    cause.label: cause
    for cause in msgspec.convert(load_table("causes")["cause"], tuple[Cause, ...])
}
"""Every cause by its label, in the order of the documentation."""
