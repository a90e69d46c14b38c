"""Evidence of a diagnosis: named facts with sources and intervals, and rates that follow."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec

from forerun.errors import InvalidRequest
from forerun.theory.intervals import Interval, normal_interval, wilson_interval
from forerun.theory.record import Json
from forerun.theory.speedup import break_even_alpha

FOLDER = Path(__file__).with_name("tables")


def load_table(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text("utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FactKind:
    """Definition of a fact: its name, type, unit and bounds.

    Attributes:
        type: number, list of numbers, yes or no, word, or list of words.
        definition: what it is; readers convert figures that an engine defines otherwise.
        who: who knows it most often: a user, an operator with logs, or a developer.
        ask: the question about it in plain words; "" where it is not asked about.
        numbers: figures that are asked for beside it.
        whole: whether a number is a count of something that has no parts.
    """

    name: str
    type: Literal["number", "numbers", "flag", "word", "words"]
    definition: str
    unit: str = ""
    low: float = 0.0
    high: float | None = None
    choices: tuple[str, ...] = ()
    who: Literal["user", "operator", "developer"] = "developer"
    ask: str = ""
    numbers: tuple[str, ...] = ()
    whole: bool = False


GROUPS: Mapping[str, tuple[FactKind, ...]] = {
    group: tuple(msgspec.convert({"name": n, **entry}, FactKind) for n, entry in entries.items())
    for group, entries in load_table("facts").items()
}
FACTS: Mapping[str, FactKind] = {kind.name: kind for group in GROUPS.values() for kind in group}


Value = bool | float | str | tuple[float, ...] | tuple[str, ...]

WROTE = "you wrote: "
"""Beginning of the source of a fact that was read from words; the sentence follows."""

SETTING = frozenset(
    {
        *("method", "k", "temperature", "batch", "context_tokens", "tensor_parallel"),
        *("target_moe", "target_recurrent", "target_quantised", "draft_quantised"),
        *("adaptive_k", "grammar_used", "changed", "draft_self_trained", "template_has_modes"),
    }
)
"""Facts that describe the set-up: a sentence that states no others was not understood."""
COUNTS = frozenset(
    {"num_drafts", "num_drafted", "num_accepted", "accepted_per_position", "drafted_per_position"}
)
"""Counts of which rates are computed, so all of them must come from one source."""
MAX_WORD = 200
"""Most characters of a fact that is a word."""
MAX_NUMBER = 1e15
"""Largest number of a fact without a limit of its own: counts are exact up to here."""
MAX_SIMILAR = 8
"""Facts that an unknown name is answered with."""
ROUNDING = 0.06
"""Difference of figures that were rounded to one decimal each."""
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

    @property
    def sentence(self) -> str:
        """The sentence that the fact was read from; "" where it was not read from words."""
        return self.source.removeprefix(WROTE) if self.source.startswith(WROTE) else ""

    @property
    def doubt(self) -> str:
        """The question whether the fact is what its sentence means."""
        meaning = self.definition
        if self.value is not True:
            listed = (
                ", ".join(map(str, self.value)) if isinstance(self.value, tuple) else self.value
            )
            meaning = f"{self.name} ({meaning}) is {listed}"
        return f'You wrote: "{self.sentence}" Does this mean that {meaning}?'

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
    """Format and completeness of one source that was read.

    Attributes:
        unread: parts that look as if they mattered and were not understood.
    """

    source: str
    kinds: set[str] = field(default_factory=set)
    num_lines: int = 0
    num_unknown: int = 0
    notes: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Json]:
        return asdict(self) | {"kinds": sorted(self.kinds)}


SLOWER, AS_FAST = 0.97, 1.0
"""Speedup: below the first decoding is slower than plain; from the second on it is not."""
ERROR_LEVEL = 0.005
"""Probability that any check of one piece of evidence finds what is not there, all together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceCheck:
    """A test of an observation, which shares one error level with all others of its evidence.

    Attributes:
        name: the observation.
        p_value: probability of what was seen, or more, where the observation does not hold.
        is_large: whether what was seen is large enough to matter.
        is_absent: whether a difference that matters is excluded.
        words: the figures that were compared.
    """

    name: str
    p_value: float
    is_large: bool
    is_absent: bool
    words: str


Points = tuple[tuple[str | float, float, float], ...]
"""A place (a time, a tag, a K), a value there, and how many steps are behind it."""


@dataclass(slots=True, kw_only=True)
class Evidence:
    """All known facts about a run, one per name, with a record of the sources read.

    A reader builds its own and returns it; `merge` joins several, and `derive` adds what follows to
    a copy. The first value of a fact stays, and a second one that differs is kept as a
    disagreement. `add` raises an error at an impossible value, for sources
    that a person can correct; `note` leaves such a value out with a note, for figures that
    were counted or calculated. The page and the JSON list every fact with its `source`; the
    terminal prints with its source each fact that counts for or against a listed cause.

    Attributes:
        disagreements: facts that lost against one of another value.
        series: figures over time, by tag and by K, for the report.
        notes: figures of impossible values, which were left out.
        checks: tests that were made, by the observation; an observation in doubt has no fact.
        changes: what changed during the run, with its time.
        conflicts: what cannot all be true, so that nothing healthy follows from it.
        doubts: what is so unusual that nothing healthy follows, though no fault is shown.
        supposed: facts that words may mean, which are asked about and not used.
    """

    facts: dict[str, Fact] = field(default_factory=dict)
    disagreements: list[Fact] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    series: dict[str, Points] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    checks: dict[str, EvidenceCheck] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    supposed: dict[str, Fact] = field(default_factory=dict)

    def add(self, name: str, value: object, source: str, interval: Interval | None = None) -> None:
        """Add a fact; a value of None is ignored."""
        if value is None:
            return
        value = check_value(name, value)
        self._keep(Fact(name=name, value=value, source=source, interval=interval))

    def _keep(self, fact: Fact) -> None:
        known = self.facts.setdefault(fact.name, fact)
        if known is not fact and not alike(known.value, fact.value):
            self.disagreements.append(fact)

    def note(self, name: str, value: object, source: str, interval: Interval | None = None) -> None:
        """Add a fact like `add`, but record a value out of range as a note and leave it out."""
        try:
            self.add(name, value, source, interval)
        except ValueError as error:
            self.notes.append(f"not used: {error} ({source})")

    def settle(self, checks: Sequence[EvidenceCheck]) -> None:
        """Add what checks show, at one error level for all of them, by Holm's procedure."""
        holds = True
        for place, check in enumerate(sorted(checks, key=lambda check: check.p_value)):
            holds = holds and check.p_value <= ERROR_LEVEL / (len(checks) - place)
            answer = True if holds and check.is_large else False if check.is_absent else None
            words = f"{check.words}, p = {check.p_value:.2g} of {len(checks)} checks"
            self.note(check.name, answer, words)
            self.checks[check.name] = check

    def suppose(self, fact: Fact) -> None:
        """Keep what words may mean; the first sentence of a fact stays."""
        self.supposed.setdefault(fact.name, fact)

    def _include(self, other: Evidence) -> None:
        is_counted = not COUNTS.isdisjoint(self.facts)
        for fact in other.facts.values():
            if is_counted and fact.name in COUNTS:
                continue
            self._keep(fact)
        self.disagreements += other.disagreements
        self.readings += other.readings
        self.notes += other.notes
        self.checks = other.checks | self.checks
        self.changes += other.changes
        self.conflicts += other.conflicts
        self.doubts += other.doubts
        self.supposed = other.supposed | self.supposed
        self.series = other.series | self.series

    def check_counts(self) -> None:
        """Refuse figures that cannot be of one run, and leave out a tau of words that cannot be."""
        tau, k = self.number("acceptance_length"), self.number("k")
        if tau is not None and k is not None and not alike(max(tau, k + 1), k + 1):
            stated = self.facts["acceptance_length"]
            sources = f"{stated.source} and {self.facts['k'].source}"
            if stated.sentence:  # a sentence may mean another K, or be misread: it is asked about
                self.suppose(self.facts.pop(stated.name))
                self.notes.append(
                    f"not used: acceptance_length {tau:g} at k {k:g} ({sources}): a step emits at "
                    "most K + 1 tokens; give both figures of one run by --fact"
                )
                return
            raise InvalidRequest(
                f"acceptance_length is {tau:g} at k {k:g} ({sources}): a step emits at most K + 1 "
                "tokens; give both figures of one run"
            )
        self.check_accepted()
        if all(reading.kinds <= {"facts", "words"} for reading in self.readings):
            for what, meaning in self._find_impossible():
                raise InvalidRequest(f"{what}: {meaning}; give figures of one run")

    def _find_impossible(self) -> Iterator[tuple[str, str]]:
        """Yield stated figures that no run has together; engines may take theirs at two times."""
        accepted, drafts, k = (self.number(n) for n in ("num_accepted", "num_drafts", "k"))
        drafted, tau = self.numbers("drafted_per_position"), self.number("acceptance_length")
        is_bare = not drafted and "num_drafted" not in self
        if accepted is not None and drafts and k and is_bare and accepted > drafts * k:
            what = f"num_accepted is {accepted:g} at num_drafts {drafts:g} and k {k:g}"
            yield what, f"{drafts:g} drafts of {k:g} tokens are {drafts * k:g}"
        if accepted is not None and drafts and tau is not None:
            counted = 1.0 + accepted / drafts
            if abs(tau - counted) > max(ROUNDING, 0.02 * counted):
                what = f"acceptance_length is {tau:g}"
                yield what, f"{accepted:g} accepted in {drafts:g} drafts are {counted:.2f}"
        rates = self.numbers("acceptance_rate_per_position")
        is_fixed = len(set(drafted)) < 2 and self.flag("adaptive_k") is not True
        for place, (before, after) in enumerate(pairwise(rates), start=1):
            if is_fixed and after > before + ROUNDING:
                what = f"acceptance_rate_per_position rises from {before:g} to {after:g}"
                yield (
                    f"{what} at position {place + 1}",
                    "a draft accepted through a position is accepted through the one before it "
                    "(rates of drafts that reached it are conditional_acceptance_per_position)",
                )
        draft_s, cycle_s = self.number("draft_s"), self.number("cycle_s")
        if draft_s is not None and cycle_s is not None and draft_s > cycle_s * (1.0 + ROUNDING):
            yield f"draft_s is {draft_s:g} at cycle_s {cycle_s:g}", "drafting is part of a step"

    def check_accepted(self) -> None:
        """Refuse counts of more accepted than drafted tokens."""
        accepted, drafted = self.number("num_accepted"), self.number("num_drafted")
        if accepted is not None and drafted is not None and accepted > drafted:
            source = self.facts["num_accepted"].source
            raise InvalidRequest(
                f"{accepted:g} accepted of {drafted:g} drafted tokens ({source}): give counts of "
                "one period, accepted ones without the bonus token"
            )

    def number(self, name: str) -> float | None:
        value = self._value(name)
        return float(value) if isinstance(value, int | float) else None

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self._value(name)
        if not isinstance(value, tuple):
            return ()
        return tuple(float(entry) for entry in value if not isinstance(entry, str))

    def flag(self, name: str) -> bool | None:
        value = self._value(name)
        return value if isinstance(value, bool) else None

    def words(self, name: str) -> tuple[str, ...]:
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


def merge(*parts: Evidence) -> Evidence:
    """Return the evidence of several sources in the order of trust; counts are of one of them."""
    found = Evidence()
    for part in parts:
        found._include(part)
    return found


def check_value(name: str, value: object) -> Value:
    """Return a value as the type of its fact; ValueError where it is none."""
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
    return f"docs/facts.md lists all of them; observations are {', '.join(sorted(flags))}"


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
    if kind.whole and kind.low <= found <= high and found % 1.0:
        raise ValueError(f"{name} is {shown(value)}; it must be a whole number")
    if not kind.low <= found <= high:  # NaN is not
        raise ValueError(
            f"{name} is {shown(value)}; it must be a number from {kind.low:g} to {high:g}"
        )
    return found


def _checked_word(name: str, value: object) -> str:
    kind = FACTS[name]
    if not isinstance(value, str) or len(value) > MAX_WORD:
        raise ValueError(f"{name} must be a text of at most {MAX_WORD} characters")
    if kind.choices and value not in kind.choices:
        raise ValueError(f"{name} is {shown(value)}; it must be one of {', '.join(kind.choices)}")
    return value


def alike(one: Value, other: Value) -> bool:
    """Whether two values of a fact agree; numbers may differ by 2%."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, bool | str | tuple) or isinstance(other, bool | str | tuple):
        return one == other
    return math.isclose(one, other, rel_tol=0.02)


MIN_REACHED = 20
"""Least number of steps that must reach a position for its conditional acceptance to be used."""
CUT = 0.25
"""Share of the least acceptance of the positions before, up to which a position ends all drafts."""
FIXED_DEPTH = frozenset({"mtp", "block"})
"""Ways to draft that may have been trained for one position; others read their own tokens."""
MIN_RATE = 1e-6
"""A rate below is none: nothing is compared with it."""


def add_rates(evidence: Evidence) -> None:
    """Add acceptance rates, tau and K, computed from the figures that are known."""
    _add_positions(evidence)
    _add_k(evidence)
    _add_length(evidence)
    _add_draft_rate(evidence)
    _add_constant(evidence)
    _add_first_position(evidence)
    _add_conditional(evidence)


def _add_positions(evidence: Evidence) -> None:
    accepted = evidence.numbers("accepted_per_position")
    drafted = evidence.numbers("drafted_per_position")
    drafts = evidence.number("num_drafts")
    if accepted and not drafted and drafts:
        drafted = (drafts,) * len(accepted)
    if accepted and len(accepted) == len(drafted) and all(drafted):
        rates = [min(1.0, a / d) for a, d in zip(accepted, drafted, strict=True)]
        evidence.note("acceptance_rate_per_position", rates, "accepted / drafted per position")


def _add_k(evidence: Evidence) -> None:
    if "k" in evidence:
        return
    if rates := evidence.numbers("acceptance_rate_per_position"):
        evidence.note("k", len(rates), "number of drafted positions")
        return
    drafted, drafts = evidence.number("num_drafted"), evidence.number("num_drafts")
    if drafted and drafts:
        evidence.note(
            "k", math.ceil(drafted / drafts - 0.01), "drafted tokens per draft, rounded up"
        )


def _add_length(evidence: Evidence) -> None:
    """Add tau from counts, else from beta, else from the draft acceptance rate at a fixed K."""
    if "acceptance_length" in evidence:
        return
    accepted, drafts = evidence.number("num_accepted"), evidence.number("num_drafts")
    rates = evidence.numbers("acceptance_rate_per_position")
    rate, k = evidence.number("draft_acceptance_rate"), evidence.number("k")
    name = "acceptance_length"
    if accepted is not None and drafts:
        tau = 1.0 + accepted / drafts
        evidence.note(name, tau, "1 + accepted / drafts", _length_interval(tau, rates, drafts))
    elif rates:
        evidence.note(name, 1.0 + sum(rates), "1 + sum of beta")
    elif rate is not None and k:
        evidence.note(
            name, 1.0 + rate * k, "1 + (accepted / drafted) x K, had every step drafted K"
        )


def _length_interval(tau: float, rates: Sequence[float], drafts: float) -> Interval | None:
    if not rates or drafts < 2:
        return None
    square = sum((2 * i - 1) * rate for i, rate in enumerate(rates, start=1))
    error = math.sqrt(max(0.0, square - (tau - 1.0) ** 2) / drafts)
    return normal_interval(tau, error, least=1.0)


def _add_draft_rate(evidence: Evidence) -> None:
    accepted, drafted = evidence.number("num_accepted"), evidence.number("num_drafted")
    tau, k = evidence.number("acceptance_length"), evidence.number("k")
    name = "draft_acceptance_rate"
    if accepted is not None and drafted and accepted <= drafted:
        interval = wilson_interval(int(accepted), int(drafted))
        evidence.note(name, accepted / drafted, "accepted / drafted tokens", interval)
    elif name not in evidence and tau is not None and k and 1.0 <= tau <= k + 1:
        evidence.note(name, (tau - 1.0) / k, "(tau - 1) / K, had every step drafted K")


def _add_constant(evidence: Evidence) -> None:
    """Add the acceptance probability that gives this tau if it is the same at every position."""
    tau, depth = evidence.number("acceptance_length"), mean_drafted(evidence)
    if tau is None or depth is None:
        return
    if "mean_drafted" not in evidence:
        evidence.note("mean_drafted", depth, "drafted tokens per drafting step")
    k = max(1, round(depth))
    if 1.0 <= tau <= k + 1:
        evidence.note("alpha", break_even_alpha(k, tau), "tau solved for a constant acceptance")
    if tau <= depth + 1.0 and is_limit(evidence):
        evidence.note("length_over_ceiling", tau / (depth + 1.0), "tau / (drafted + 1)")


def is_limit(evidence: Evidence) -> bool:
    """Whether K is the limit of most drafts.

    A controller that drafts more in some steps than in most has chosen the K of most. That all of
    a K chosen by its costs is accepted does not show that it is too small.
    """
    steps = {k: num_steps for k, num_steps, _ in evidence.series.get("K", ())}
    return not steps or max(steps, key=steps.__getitem__) == max(steps)


def mean_drafted(evidence: Evidence) -> float | None:
    """Return the tokens drafted per step: K, or fewer where drafts end earlier."""
    drafted, drafts = evidence.number("num_drafted"), evidence.number("num_drafts")
    tau, rate = evidence.number("acceptance_length"), evidence.number("draft_acceptance_rate")
    k = evidence.number("k")
    if (known := evidence.number("mean_drafted")) is not None:
        return known
    if drafted and drafts:
        return drafted / drafts
    if tau is not None and tau > 1.0 and rate:
        found = (tau - 1.0) / rate
        return found if k is None else min(found, k)
    return k or None


def _add_first_position(evidence: Evidence) -> None:
    accepted = evidence.numbers("accepted_per_position")
    drafted = evidence.numbers("drafted_per_position")
    drafts = evidence.number("num_drafts")
    trials = drafted[0] if drafted else drafts
    if accepted and trials and accepted[0] <= trials:
        interval = wilson_interval(int(accepted[0]), int(trials))
        evidence.note("alpha_1", interval.estimate, "accepted at position 1 / drafts", interval)
    elif rates := evidence.numbers("acceptance_rate_per_position"):
        evidence.note("alpha_1", rates[0], "beta of position 1")
    else:
        evidence.note("alpha_1", evidence.number("alpha"), "taken as constant over positions")


def _add_conditional(evidence: Evidence) -> None:
    rates = evidence.numbers("acceptance_rate_per_position")
    name = "conditional_acceptance_per_position"
    if name not in evidence and rates and rates[0] > 0.0:
        ratios = [rates[0]]
        ratios += [min(1.0, after / before) if before else 0.0 for before, after in pairwise(rates)]
        evidence.note(name, ratios, "beta over that of the position before")
    conditional = evidence.numbers(name)
    reached = _count_reached(evidence, rates) or [math.inf] * (len(conditional) - 1)
    later = [
        (value, count)
        for value, count in zip(conditional[1:], reached, strict=False)
        if count >= MIN_REACHED
    ]
    if later and conditional[0] > MIN_RATE:
        value, count = min(later)
        interval = None
        if count < math.inf:
            found = wilson_interval(round(value * count), round(count))
            low, high = found.low / conditional[0], found.high / conditional[0]
            interval = Interval(estimate=value / conditional[0], low=low, high=high)
        words = "lowest later conditional acceptance / the first"
        evidence.note("later_over_first", value / conditional[0], words, interval)
        place = conditional.index(value, 1)
        is_cut = (
            interval is not None
            and interval.high <= CUT * min(conditional[:place]) / conditional[0]
        )
        if is_cut and (place > 1 or FIXED_DEPTH & {*evidence.words("method")}):
            words = f"{value:.0%} of the drafts that reach position {place + 1} are accepted there"
            evidence.note("accepted_to_a_depth", True, words)


def _count_reached(evidence: Evidence, rates: Sequence[float]) -> list[float]:
    """Return most steps that can have reached each position after the first; none if not known.

    Where K varies, a position may be drafted in far fewer steps than accept the one before it.
    """
    accepted = evidence.numbers("accepted_per_position")
    drafted = evidence.numbers("drafted_per_position")
    if accepted and len(accepted) == len(drafted):
        return [*map(min, accepted, drafted[1:])]
    drafts = evidence.number("num_drafts")
    return [] if drafts is None else [rate * drafts for rate in rates]


MIN_DRAFTING_SHARE = 0.9
"""Share of the steps with a draft from which on kappa follows from the speed of all steps. The
first step of a request has no draft."""


def add_costs(evidence: Evidence) -> None:
    """Add kappa, its parts and the speedup, from timers or from two rates."""
    _add_times(evidence)
    _add_parts(evidence)
    with_s, plain = evidence.number("tokens_per_s"), evidence.number("tokens_per_s_plain")
    if with_s and plain:
        evidence.note("speedup", with_s / plain, "tokens/s with over without speculation")
    tau, kappa = evidence.number("acceptance_length"), evidence.number("cycle_cost")
    gain = evidence.number("speedup")
    if kappa is None and tau and gain and not _has_plain_steps(evidence):
        kappa = tau / gain
        evidence.note("cycle_cost", kappa, "tau / speedup")
    if tau and kappa and gain is None:
        _add_speedup(evidence, tau, kappa)
    kappa, c, k = (evidence.number(name) for name in ("cycle_cost", "draft_cost", "k"))
    if kappa and c is not None and k and "verify_cost" not in evidence and kappa > k * c:
        evidence.note("verify_cost", kappa - k * c, "kappa - K c: the pass, overhead included")
    _add_linearity(evidence)


def _add_speedup(evidence: Evidence, tau: float, kappa: float) -> None:
    """Add the speedup of the whole run, in which steps without a draft cost one plain step."""
    steps, drafts = evidence.number("num_steps"), evidence.number("num_drafts")
    if steps and drafts and drafts < steps:
        gain = (drafts * tau + steps - drafts) / (drafts * kappa + steps - drafts)
        evidence.note("speedup", gain, f"tau / kappa of {drafts:g} of {steps:g} steps, plain rest")
    else:
        evidence.note("speedup", tau / kappa, "tau / kappa")


def _has_plain_steps(evidence: Evidence) -> bool:
    """Whether the speed of all steps says little of those with a draft, because many have none."""
    steps, drafts = evidence.number("num_steps"), evidence.number("num_drafts")
    return bool(steps and drafts and drafts < MIN_DRAFTING_SHARE * steps)


def _add_times(evidence: Evidence) -> None:
    """Add step times computed from throughput, where one sequence decodes."""
    if evidence.number("batch") not in (None, 1.0):
        return
    for name, tokens, rate, words in (
        ("cycle_s", evidence.number("acceptance_length"), "tokens_per_s", "tau / (tokens/s)"),
        ("plain_step_s", 1.0, "tokens_per_s_plain", "1 / (plain tokens/s)"),
    ):
        per_s = evidence.number(rate)
        if tokens and per_s and name not in evidence:
            evidence.note(name, tokens / per_s, words)


def _add_parts(evidence: Evidence) -> None:
    plain_s, k = evidence.number("plain_step_s"), evidence.number("k")
    if not plain_s:
        return
    for name, part, words in (
        ("cycle_cost", "cycle_s", "step time / plain step time"),
        ("verify_cost", "verify_s", "target pass / plain step time"),
        ("overhead", "other_s", "other time / plain step time"),
    ):
        if (part_s := evidence.number(part)) is not None and (part_s or part != "cycle_s"):
            evidence.note(name, part_s / plain_s, words)
    draft_s, token_s = evidence.number("draft_s"), evidence.number("draft_token_s")
    if draft_s is not None and k:
        evidence.note("draft_cost", draft_s / plain_s / k, "drafting / K / plain step time")
    elif token_s is not None:
        evidence.note("draft_cost", token_s / plain_s, "drafted token / plain step time")


def _add_linearity(evidence: Evidence) -> None:
    k, batch, nodes = (evidence.number(name) for name in ("k", "batch", "tree_nodes"))
    v = evidence.number("verify_cost")
    if k and batch:
        _add_rows(evidence, k, batch)
    rows, costs = evidence.numbers("verify_rows"), evidence.numbers("verify_costs")
    if len(rows) > 1 and len(rows) == len(costs) and rows[-1] > rows[0]:
        slope = max(0.0, (costs[-1] - costs[0]) / (rows[-1] - rows[0]))
        evidence.note("verify_linearity", slope, "slope of v over rows per sequence")
    elif k and v is not None:
        evidence.note(
            "verify_linearity", max(0.0, v - 1.0) / (nodes or k), "(v - 1) / drafted rows"
        )


FREE_ROWS = 128.0
"""Rows up to which a pass of an accelerator is limited by reading weights, not by computing."""
FREE_ROWS_CPU = 16.0
MIN_GROWTH = 0.05
"""Least relative growth of a pass's time that is told from measurement noise."""


def _add_rows(evidence: Evidence, k: float, batch: float) -> None:
    """Add the rows of a pass, whether they are many for the device, and whether the batch is why.

    Where n sequences take 1 + s (n - 1) of the plain step of one, a pass over n (K + 1) rows that
    is no worse than that takes (1 + s (n (K + 1) - 1)) / (1 + s (n - 1)) of a plain step of n.
    """
    nodes = evidence.number("tree_nodes")
    rows = batch * ((nodes or k) + 1)
    evidence.note("rows", rows, "batch x (nodes + 1)" if nodes else "batch x (K + 1)")
    on_cpu = any(name.startswith("cpu") for name in evidence.words("device"))
    free = FREE_ROWS_CPU if on_cpu else FREE_ROWS
    evidence.note("rows_over_free", rows / free, f"rows over {free:g}")
    slope, v = evidence.number("batch_linearity"), evidence.number("verify_cost")
    if slope is not None and v is not None and batch > 1.0:
        as_batch = (1.0 + slope * (rows - 1.0)) / (1.0 + slope * (batch - 1.0))
        share = max(0.0, v - 1.0) / max(MIN_GROWTH, as_batch - 1.0)
        evidence.note("verify_over_batch", share, f"v {v:.2f}, by the batch alone {as_batch:.2f}")


RATIOS: Sequence[tuple[str, str, str]] = load_table("derived")["ratio"]
"""Facts that are ratios of two figures: name, numerator, denominator."""


def add_ratios(evidence: Evidence) -> None:
    if "tokens_per_s_client" in evidence and "tokens_per_s_server" not in evidence:
        rate = evidence.number("tokens_per_s")
        evidence.note("tokens_per_s_server", rate, "the rate that was measured at the engine")
    k, before = evidence.number("k"), evidence.number("reference_k")
    if k and before and k != before:  # tau grows with K, whatever the draft
        _add_ratio(evidence, "reference_ratio", "alpha", "reference_alpha")
    for name, over, under in RATIOS:
        _add_ratio(evidence, name, over, under)
    with_rate = evidence.number("prefix_hit_rate")
    without = evidence.number("prefix_hit_rate_plain")
    if with_rate is not None and without is not None:
        lost = max(0.0, without - with_rate)
        evidence.note("prefix_hit_loss", lost, "prefix hit rate without minus with speculation")


def _add_ratio(evidence: Evidence, name: str, over: str, under: str) -> None:
    above, below = evidence.number(over), evidence.number(under)
    if above is not None and below and name not in evidence:
        evidence.note(name, above / below, f"{over} / {under}")
