"""Summary of a trace: tokens per step, cost per step, acceptance by position, and time split.

Durations belong to a cycle, which all requests of a batch share. Sums of time count every cycle
once; the cost of a step is the mean over requests and steps, as tau is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

import numpy as np

from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.intervals import Interval, wilson_interval
from forerun.theory.record import Json, RequestRecord, StepRecord, TraceHeader
from forerun.trace.columns import (
    DRAFTING,
    KINDS,
    Columns,
    CycleKind,
    Ints,
    StepBlock,
    chosen,
    pieces_of,
    sums_by,
)
from forerun.trace.files import DURATIONS, Damage, Item

MAX_DAMAGE = 20
"""Damaged places that are named; further ones are counted."""
MAX_RUNNING = 100_000
"""Requests whose end has not been read; each takes some kilobytes of memory."""
MAX_TAGS = 1000
"""Tags with figures of their own."""
OTHER_TAGS = "(further tags)"
MAX_TIMES = 1_000_000
"""Times to the first token, of which the median is taken."""
MAX_HEADERS = 1000


MIN_PLAIN_STEPS = 8
"""Plain steps, counted per request, below which their mean time is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCycleCost:
    """Mean cost of drafting steps in plain steps of the same batch size (kappa).

    Attributes:
        num_steps: drafting steps that are compared.
        num_uncompared: drafting steps left out, because no plain step had their batch size.
    """

    estimate: float
    num_steps: int
    num_uncompared: int


@dataclass(slots=True, kw_only=True)
class Seconds:
    """Numbers of cycles, of their steps and tokens, and the sums of their durations in seconds."""

    num_cycles: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s

    def add(self, cycle: Sequence[StepRecord]) -> None:
        """Add the cycle that these records share."""
        self.num_cycles += 1
        self.num_steps += len(cycle)
        self.num_tokens += sum(record.num_emitted for record in cycle)
        for name in DURATIONS:
            setattr(self, name, getattr(self, name) + getattr(cycle[0], name))

    def include(self, other: Seconds) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def seconds_by(
    keys: Sequence[Ints], columns: Columns, num_steps: Ints
) -> Iterator[tuple[tuple[int, ...], Seconds]]:
    """Yield every combination of the keys with the seconds of its rows, which are cycles.

    Args:
        num_steps: number of steps that each row counts for.
    """
    values = [num_steps, columns["cycle_tokens"], *(columns[name] for name in DURATIONS)]
    for place, num_cycles, (steps, tokens, draft_s, verify_s, other_s) in sums_by(keys, values):
        yield (
            place,
            Seconds(
                num_cycles=num_cycles,
                num_steps=int(steps),
                num_tokens=int(tokens),
                draft_s=draft_s,
                verify_s=verify_s,
                other_s=other_s,
            ),
        )


def merged(parts: Iterable[Seconds]) -> Seconds:
    """Sum cycles of several kinds or batch sizes."""
    total = Seconds()
    for part in parts:
        total.include(part)
    return total


@dataclass(slots=True)
class CyclesByKind:
    """Durations of cycles by kind and batch size: a cycle with more requests takes longer.

    The cycles of a group of requests are counted once for each of its steps in them.
    """

    places: defaultdict[tuple[CycleKind, int], Seconds] = field(
        default_factory=lambda: defaultdict(Seconds)
    )

    def add(self, columns: Columns, num_steps: Ints) -> None:
        """Add one cycle per row, counting the given number of steps of each."""
        for (kind, size), part in seconds_by(
            (columns["kind"], columns["size"]), columns, num_steps
        ):
            self.places[KINDS[kind], size].include(part)

    def include(self, other: CyclesByKind) -> None:
        for key, seconds in other.places.items():
            self.places[key].include(seconds)

    def by_size(self, kind: CycleKind) -> dict[int, Seconds]:
        """Return the cycles of a kind by the number of requests in them."""
        return {size: seconds for (k, size), seconds in self.places.items() if k == kind}

    @property
    def plain_step_s(self) -> dict[int, float]:
        """Return mean seconds of a plain step by batch size, where there are enough plain steps."""
        return {
            size: seconds.total_s / seconds.num_cycles
            for size, seconds in self.by_size("plain").items()
            if seconds.num_steps >= MIN_PLAIN_STEPS and seconds.total_s > 0.0
        }

    def cycle_cost(self, plain_step_s: Mapping[int, float]) -> MeasuredCycleCost | None:
        """Return the mean cost of drafting steps in plain steps; None if no size has both."""
        drafting = self.by_size("drafting")
        compared = {size: seconds for size, seconds in drafting.items() if size in plain_step_s}
        if not compared:
            return None
        used = merged(compared.values())
        plain_s = sum(plain_step_s[size] * part.num_cycles for size, part in compared.items())
        return MeasuredCycleCost(
            estimate=used.total_s / plain_s,
            num_steps=used.num_steps,
            num_uncompared=merged(drafting.values()).num_steps - used.num_steps,
        )

    def speedup(self, plain_step_s: Mapping[int, float]) -> float | None:
        """Return the rate of all decode cycles over that of plain ones; None if none is known.

        Plain cycles and those without a proposal count too, so that this is below tau / kappa,
        which is of drafting steps alone, where a controller planned some steps without a draft.
        """
        decoded = [
            (size, seconds)
            for (kind, size), seconds in self.places.items()
            if kind != "prefill" and size in plain_step_s
        ]
        total_s = sum(seconds.total_s for _, seconds in decoded)
        plain_s = sum(seconds.num_tokens / size * plain_step_s[size] for size, seconds in decoded)
        return plain_s / total_s if total_s > 0.0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Acceptance at one position of the draft.

    Attributes:
        num_drafted: steps that drafted it; the denominator of beta.
        rate: beta with its 95% Wilson interval.
        survival: P(accepted through it) had every step drafted it.
    """

    num_drafted: int
    num_accepted: int
    rate: Interval
    survival: float


@dataclass(slots=True, kw_only=True)
class GroupSummary:
    """Totals over the steps of a group of requests, such as all requests with one tag.

    Attributes:
        expected_accepted: sum over drafting steps of what the verifier was expected to accept.
    """

    num_requests: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    expected_accepted: float = 0.0
    acceptance: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    costs: CyclesByKind = field(default_factory=CyclesByKind)

    def add(self, columns: Columns) -> None:
        """Add steps, as columns of a block."""
        drafting = columns["num_drafted"] > 0
        self.num_steps += len(drafting)
        self.num_tokens += int(columns["num_emitted"].sum())
        self.expected_accepted += float(columns["expected_accepted"][drafting].sum())
        counts = (columns[name][drafting].tolist() for name in ("depth_drafted", "num_accepted"))
        self.acceptance.steps.update(zip(*counts, strict=True))
        self.acceptance.num_drafted += int(columns["num_drafted"].sum())
        # A plain step in a cycle that drafts for others costs more.
        counted = chosen(columns, drafting | (columns["kind"] != DRAFTING))
        self.costs.add(counted, np.ones_like(counted["step"]))

    def include(self, other: GroupSummary) -> None:
        self.num_requests += other.num_requests
        self.num_steps += other.num_steps
        self.num_tokens += other.num_tokens
        self.expected_accepted += other.expected_accepted
        self.acceptance = self.acceptance + other.acceptance
        self.costs.include(other.costs)

    @property
    def wasted_share(self) -> float | None:
        """Share of drafted nodes that were not accepted; None if nothing was drafted."""
        rate = self.acceptance.draft_acceptance_rate
        return None if rate is None else 1.0 - rate

    @property
    def positions(self) -> tuple[Position, ...]:
        """Return the acceptance at each position from 1 on."""
        counts = self.acceptance
        columns = counts.drafted_per_position, counts.accepted_per_position, counts.survival
        return tuple(
            Position(num_drafted=n, num_accepted=k, rate=wilson_interval(k, n), survival=survival)
            for n, k, survival in zip(*columns, strict=True)
        )

    def to_dict(self, plain_step_s: Mapping[int, float]) -> dict[str, Json]:
        """Return JSON-ready values; `plain_step_s` as for `CyclesByKind.cycle_cost`."""
        counts, cost = self.acceptance, self.costs.cycle_cost(plain_step_s)
        return {
            "num_requests": self.num_requests,
            "num_steps": self.num_steps,
            "num_tokens": self.num_tokens,
            "num_drafting_steps": counts.num_steps,
            "num_drafted": counts.num_drafted,
            "num_accepted": counts.num_accepted,
            "expected_accepted": self.expected_accepted,
            "draft_acceptance_rate": counts.draft_acceptance_rate,
            "wasted_share": self.wasted_share,
            "acceptance_length": counts.acceptance_length,
            "cycle_cost": None if cost is None else asdict(cost),
            "speedup": self.costs.speedup(plain_step_s),
            "positions": [
                {
                    "num_drafted": position.num_drafted,
                    "num_accepted": position.num_accepted,
                    "acceptance_rate_per_position": position.rate.estimate,
                    "acceptance_rate_per_position_ci": [position.rate.low, position.rate.high],
                    "survival": position.survival,
                }
                for position in self.positions
            ],
        }


@dataclass(slots=True, kw_only=True)
class TraceSummary:
    """All figures of a trace, as `summarise` computes them.

    Attributes:
        tags: steps by tag of their request; a request with several tags counts under each.
        cycles: every cycle of the engine, counted once.
        num_unfinished: requests without a record of their end.
        ttft_s: seconds to the first token, one per finished request that had one.
    """

    headers: list[TraceHeader] = field(default_factory=list)
    overall: GroupSummary = field(default_factory=GroupSummary)
    tags: dict[str, GroupSummary] = field(default_factory=dict)
    num_unfinished: int = 0
    cycles: CyclesByKind = field(default_factory=CyclesByKind)
    ttft_s: list[float] = field(default_factory=list)
    num_damaged: int = 0
    damage: list[Damage] = field(default_factory=list)

    def include(self, group: GroupSummary, tags: Iterable[str]) -> None:
        self.overall.include(group)
        for tag in tags:
            known = tag in self.tags or len(self.tags) < MAX_TAGS
            self.tags.setdefault(tag if known else OTHER_TAGS, GroupSummary()).include(group)

    @property
    def times(self) -> Seconds:
        return merged(self.cycles.places.values())

    @property
    def num_prefill_cycles(self) -> int:
        return merged(self.cycles.by_size("prefill").values()).num_cycles

    @property
    def plain_step_s(self) -> Mapping[int, float]:
        """Return mean seconds of a plain step by batch size, where there are enough plain steps."""
        return self.overall.costs.plain_step_s

    @property
    def cycle_cost(self) -> MeasuredCycleCost | None:
        """Return the mean cost of drafting steps in plain steps; None if too few are plain."""
        return self.overall.costs.cycle_cost(self.plain_step_s)

    @property
    def speedup(self) -> float | None:
        """Return the speedup of all decode cycles, plain ones included; None if it is not known."""
        return self.cycles.speedup(self.plain_step_s)

    @property
    def median_ttft_s(self) -> float | None:
        return median(self.ttft_s) if self.ttft_s else None

    def to_dict(self) -> dict[str, Json]:
        plain, times = self.plain_step_s, self.times
        return {
            "headers": [header.to_dict() for header in self.headers],
            "overall": self.overall.to_dict(plain),
            "tags": {tag: group.to_dict(plain) for tag, group in self.tags.items()},
            "num_unfinished": self.num_unfinished,
            "median_ttft_s": self.median_ttft_s,
            "times": {
                "num_cycles": times.num_cycles,
                "num_prefill_cycles": self.num_prefill_cycles,
                "draft_s": times.draft_s,
                "verify_s": times.verify_s,
                "other_s": times.other_s,
            },
            "num_damaged": self.num_damaged,
            "damage": [asdict(place) for place in self.damage],
        }


def summarise(items: Iterable[Item]) -> TraceSummary:
    """Compute the summary of a trace from its readable records."""
    found = TraceSummary()
    running: dict[str, GroupSummary] = {}
    ended: dict[str, tuple[str, ...]] = {}  # records that were read, by request
    early: dict[str, tuple[str, ...]] = {}  # those whose steps have not been read
    num_dropped = 0
    for piece in pieces_of(items):
        if not isinstance(piece, StepBlock):
            _add_other(piece, found, ended)
            continue
        found.cycles.add(chosen(piece.columns, piece.first), piece.columns["size"][piece.first])
        for name, steps in _by_request(piece):
            running.setdefault(name, GroupSummary(num_requests=1)).add(steps)
        for name, tags in ended.items():
            if name in running:
                found.include(running.pop(name), tags)
            elif len(early) < MAX_RUNNING:
                early[name] = tags
        ended.clear()
        while len(running) > MAX_RUNNING:  # the oldest one, without its tags
            found.include(running.pop(next(iter(running))), ())
            num_dropped += 1
    early |= ended
    for name, group in running.items():
        found.include(group, early.get(name, ()))
    found.num_unfinished = len(running.keys() - early.keys())
    found.num_unfinished += max(0, num_dropped - len(early.keys() - running.keys()))
    return found


def _by_request(block: StepBlock) -> Iterator[tuple[str, Columns]]:
    order = np.argsort(block.columns["request"], kind="stable")
    ends = np.cumsum(np.bincount(block.columns["request"]))
    steps = chosen(block.columns, order)
    for name, start, end in zip(block.names, [0, *ends[:-1]], ends, strict=True):
        yield name, chosen(steps, slice(start, end))


def _add_other(
    item: TraceHeader | RequestRecord | Damage,
    found: TraceSummary,
    ended: dict[str, tuple[str, ...]],
) -> None:
    if isinstance(item, RequestRecord):
        ended[item.request_id] = item.tags
        if item.ttft_s is not None and len(found.ttft_s) < MAX_TIMES:
            found.ttft_s.append(item.ttft_s)
    elif isinstance(item, TraceHeader):
        if len(found.headers) < MAX_HEADERS:
            found.headers.append(item)
    else:
        found.num_damaged += 1
        if len(found.damage) < MAX_DAMAGE:
            found.damage.append(item)
