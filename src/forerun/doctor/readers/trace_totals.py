"""Totals over the steps of a trace, and comparison of acceptance between groups of steps.

Both are computed from one block of columns at a time. A stretch is a run of consecutive steps of a
request.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as dataclass_replace
from itertools import product
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from forerun.doctor.evidence import MAX_WORD
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.figures import Seconds
from forerun.theory.intervals import student_tail
from forerun.theory.record import RequestRecord, StepRecord, TraceHeader
from forerun.trace.columns import (
    DRAFTING,
    PREFILL,
    Columns,
    Ints,
    Mask,
    Piece,
    Reals,
    StepBlock,
    chosen,
    pieces_of,
)
from forerun.trace.cycles import CyclesByKind, seconds_by
from forerun.trace.files import Item, read_trace

MIN_REQUESTS = 8
STRETCH_STEPS = 64
"""Steps of a stretch if there are fewer requests than `MIN_REQUESTS`; otherwise it is a request."""
OUTCOMES = ("none", "partial", "full")
NONE, PARTIAL, FULL = range(len(OUTCOMES))
NO_RECENT_PAUSE, AFTER_PAUSE = range(2)
"""Kinds of drafting steps: those long after the last plain step, and those shortly after one."""
NO_PLACE = -1
MIN_NEIGHBOURS = 3
"""Least number of other steps in a stretch to compare a step with."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StretchCounts:
    """Counts of drafting steps by stretch, a run of one request's steps, and by one property.

    Attributes:
        stretch: index of the stretch.
        place: value of the property.
        num_steps: drafting steps with that value in that stretch.
        num_first: those of them whose first draft token was accepted.
        total: sum over these steps of the share of the draft that the verifier expected to accept.
        squares: sum of the squares of these shares.
    """

    stretch: Ints
    place: Ints
    num_steps: Reals
    num_first: Reals
    total: Reals
    squares: Reals

    @classmethod
    def joined(cls, parts: Sequence[StretchCounts]) -> StretchCounts:
        return cls(
            **{
                name: np.concatenate([getattr(part, name) for part in parts])
                for name in cls.__dataclass_fields__
            }
        )


@dataclass(slots=True, kw_only=True)
class Stretches:
    """Counts of drafting steps by stretch, for each property that is compared."""

    request_ids: list[str] = field(default_factory=list)
    parts: dict[str, list[StretchCounts]] = field(default_factory=dict)

    def add(self, drafting: Columns, names: Sequence[str]) -> None:
        """Count drafting steps as `with_previous` returns them; `names` are those of requests."""
        stretch, first = _stretch_of(drafting, len(names))
        share = _expected_share(drafting)
        accepted = (drafting["num_accepted"] > 0).astype(np.float64)
        rows = drafting["batch_rows"] // (drafting["num_drafted"] + 1)
        around, outcome = _against_others(drafting["previous"], stretch, share)
        for name, place, values in (
            ("all", np.zeros_like(stretch), share),
            ("previous", outcome, around),
            ("paused", drafting["paused"], share),
            ("context", bucket(drafting["context_tokens"]), share),
            ("index", bucket(drafting["step"]), share),
            ("company", (rows >= 2).astype(np.int64), share),
        ):
            counted = counts(stretch + len(self.request_ids), place, accepted, values)
            self.parts.setdefault(name, []).append(counted)
        self.request_ids += [names[index] for index in drafting["request"][first]]

    def by(self, name: str) -> StretchCounts:
        none = np.zeros(0, np.int64)
        empty = counts(none, none, none.astype(np.float64), none.astype(np.float64))
        return StretchCounts.joined(self.parts.get(name, [empty]))


def bucket(values: Ints) -> Ints:
    found: Ints = np.floor(np.log2(values + 1.0) / 2.0).astype(np.int64)
    return found


def _stretch_of(drafting: Columns, num_requests: int) -> tuple[Ints, Ints]:
    """Return the stretch of every step, and the first step of every stretch."""
    request, part = drafting["request"], drafting["step"] // STRETCH_STEPS
    if num_requests >= MIN_REQUESTS:
        part = np.zeros_like(part)
    begins = np.ones(len(part), np.bool_)
    begins[1:] = (np.diff(request) != 0) | (np.diff(part) != 0)
    return np.cumsum(begins) - 1, np.flatnonzero(begins)


def _expected_share(drafting: Columns) -> Reals:
    """Return the expected accepted share of each draft, corrected for the draft's depth.

    The expectation is over the verifier's own draws, so it scatters less than what was accepted. A
    deeper draft has a lower share of the same text; that is taken off.
    """
    depth = drafting["depth_drafted"]
    accepted = drafting[
        "expected_accepted" if drafting["expected_accepted"].any() else "num_accepted"
    ]
    share: Reals = np.minimum(1.0, accepted / depth)
    means = np.bincount(depth, share) / np.maximum(1.0, np.bincount(depth))
    levelled: Reals = share + share.mean() - means[depth]
    return levelled


def _against_others(previous: Ints, stretch: Ints, share: Reals) -> tuple[Reals, Ints]:
    """Return each share minus the mean of its stretch's other steps, and the previous outcomes.

    Where steps of a stretch come in any order, the one after a certain step is one of the others.
    So its share is held against theirs, without that step: a stretch that begins well would
    otherwise seem to fall off (Miller and Sanjurjo 2018).
    """
    before = np.roll(share, 1)
    known = np.zeros(len(stretch), np.bool_)
    known[1:] = stretch[1:] == stretch[:-1]
    num_steps = np.bincount(stretch)[stretch]
    known &= num_steps >= MIN_NEIGHBOURS
    others = (np.bincount(stretch, share)[stretch] - before) / np.maximum(1, num_steps - 1)
    return share - others, np.where(known, previous, NO_PLACE)


def counts(stretch: Ints, place: Ints, accepted: Reals, values: Reals) -> StretchCounts:
    """Count the steps of every stretch of a request by the value of a property, if it has one."""
    used = place != NO_PLACE
    stretch, place, accepted, values = (a[used] for a in (stretch, place, accepted, values))
    width = int(place.max(initial=0)) + 1
    pairs, index = np.unique(stretch * width + place, return_inverse=True)
    size = len(pairs)
    return StretchCounts(
        stretch=pairs // width,
        place=pairs % width,
        num_steps=np.bincount(index, minlength=size).astype(np.float64),
        num_first=summed(index, accepted, size),
        total=summed(index, values, size),
        squares=summed(index, values * values, size),
    )


def summed(index: Ints, values: Reals, size: int) -> Reals:
    return np.bincount(index, values, size).astype(np.float64)


MIN_STEPS = 40
MIN_STRETCHES = 4
"""Least number of stretches in each group, from which their variance is estimated."""
NO_FALL = 0.1
"""Share of the draft: acceptance does not fall if the difference is below this by two errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Counts and mean acceptance of one of the two groups of steps in a `Comparison`.

    Attributes:
        mean: mean of the values that are compared.
        num_first: steps whose first draft token was accepted.
    """

    num_steps: int
    num_stretches: int
    mean: float
    num_first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    high: Side
    low: Side
    error: float
    freedom: float

    @property
    def difference(self) -> float:
        return self.high.mean - self.low.mean

    @property
    def t(self) -> float:
        return self.difference / self.error if self.error > 0.0 else math.inf * self.difference

    @property
    def p_value(self) -> float:
        """Probability of such a difference, or a larger one, between groups that do not differ."""
        return student_tail(self.t, self.freedom)


def compare(places: StretchCounts, high: Mask, low: Mask) -> Comparison | None:
    """Compare two groups of steps; None where either has too few.

    The error is the larger of two estimates: from the variance between stretches, which allows for
    correlated steps but is uncertain if there are few stretches, and from that between steps.
    """
    sides = [_side_of(places, mask) for mask in (high, low)]
    if any(s.num_steps < MIN_STEPS or s.num_stretches < MIN_STRETCHES for s in sides):
        return None
    spread: list[float] = []
    shifts: list[Reals] = []
    num_stretches = int(places.stretch.max()) + 1
    for side, mask in zip(sides, (high, low), strict=True):
        num_steps, total = places.num_steps[mask], places.total[mask]
        shift = (total - num_steps * side.mean) / side.num_steps
        shifts.append(summed(places.stretch[mask], shift, num_stretches))
        variance = places.squares[mask].sum() / side.num_steps - side.mean**2
        spread.append(max(0.0, float(variance)) / side.num_steps)
    num = [side.num_stretches for side in sides]
    parts = [float((s**2).sum()) * n / (n - 1) for s, n in zip(shifts, num, strict=True)]
    between = sum(parts) - 2.0 * float((shifts[0] * shifts[1]).sum())
    # Welch and Satterthwaite; with fewer stretches on a side it counts for less.
    freedom = sum(parts) ** 2 / max(
        1e-300, sum(part**2 / (n - 1) for part, n in zip(parts, num, strict=True))
    )
    if between < sum(spread):  # the stretches vary no more than their steps make them
        freedom = max(freedom, float(sum(num) - 2))
    return Comparison(
        high=sides[0],
        low=sides[1],
        error=math.sqrt(max(0.0, between, sum(spread))),
        freedom=max(1.0, freedom),
    )


def ends(places: StretchCounts) -> Comparison | None:
    """Compare long contexts with short ones, divided so that both groups are large."""
    best: tuple[float, Mask] | None = None
    for cut in np.unique(places.place)[1:]:
        short: Mask = places.place < cut
        size = min(places.num_steps[short].sum(), places.num_steps[~short].sum())
        if best is None or size > best[0]:
            best = size, short
    return None if best is None else compare(places, best[1], ~best[1])


def _side_of(places: StretchCounts, mask: Mask) -> Side:
    num_steps = int(places.num_steps[mask].sum())
    return Side(
        num_steps=num_steps,
        num_stretches=len(np.unique(places.stretch[mask])),
        mean=float(places.total[mask].sum()) / max(1, num_steps),
        num_first=int(places.num_first[mask].sum()),
    )


BETS = np.outer([1.0, -1.0], [0.02, 0.05, 0.1, 0.2, 0.4, 0.8])
"""Exponents at which `ExcessTest` tilts the accepted share of a draft, up and down."""


class ExcessTest:
    """Test martingales against the hypothesis that no more, or less, is accepted than expected.

    Given its proposal, a step accepts a share x of its depth with mean m, so that exp(b x) has a
    mean of at most 1 + m (e^b - 1), whatever else its distribution is (Hoeffding 1963). So the
    product over steps of exp(b x) / (1 + m (e^b - 1)) has a mean of at most 1 for every exponent b,
    and so has the mean of the products. It exceeds 1 / p with a probability of at most p.
    """

    def __init__(self) -> None:
        self._logs = np.zeros(BETS.shape)

    def add(self, drafting: Columns) -> None:
        depth = drafting["depth_drafted"]
        share = drafting["num_accepted"] / depth
        mean = np.minimum(1.0, drafting["expected_accepted"] / depth)
        self._logs += BETS * share.sum() - np.log1p(np.expm1(BETS)[..., None] * mean).sum(-1)

    @property
    def values(self) -> tuple[float, float]:
        """The e-values; large where more, and where less, is accepted than expected."""
        above, below = np.exp(np.minimum(self._logs, 700.0)).mean(1).tolist()
        return above, below


SOON, LONG = 2, 5
"""Steps that draft after a plain one: soon after up to the first, long after past the second."""
KEPT = 50_000
"""Most output tokens that are kept to measure repetition."""
SLICES = 32
"""Number of points of the series over time for each block of steps."""
ALIKE_DRAFTS = 5
"""Consecutive drafts of one text that count as one, because they are alike."""
PERIODS = range(2, 21)
"""Periods at which drafts that accept nothing are looked for."""
NUMBERED = {"steps of a request": "step", "cycles": "cycle_id", "drafts": "draft"}
"""What is numbered, and by which column, to see whether every so many of them accept nothing."""


@dataclass(slots=True, kw_only=True)
class RefusedRun:
    """Consecutive drafts of a trace of which none is accepted."""

    begun_s: float = 0.0
    ended_s: float = 0.0
    num_drafts: int = 0
    request_ids: set[str] = field(default_factory=set)

    @property
    def num_trials(self) -> float:
        """Drafts that count as independent ones."""
        return max(len(self.request_ids), self.num_drafts / ALIKE_DRAFTS)

    def add(self, step: StepRecord) -> None:
        self.begun_s = self.begun_s if self.num_drafts else step.t_s
        self.ended_s = step.t_s
        self.num_drafts += 1
        self.request_ids.add(step.request_id)


PAUSING = frozenset({"suffix"})
"""Drafters that draft nothing in text without repetition, whatever K is."""
MAX_HEADERS = 1000
MAX_STEPS = 5_000_000
"""Most steps that are read, to bound the time; more would hardly make a figure more precise."""
MAX_REQUESTS = 200_000
"""Most requests that are kept; each takes about a kilobyte of memory."""
MAX_TAGS = 16
"""Most tags of one request."""
MAX_PROMPT_TOKENS = 1_000_000
"""Most prompt tokens that are kept to see whether prompts are random."""
MAX_NAMED_DAMAGE = 3
MAX_DAMAGE = 100_000
"""Most unreadable places of a file; reading stops there."""
PARAMETERS = ("temperature", "top_k", "top_p", "verification", "draft_temperature")
"""Parameters of requests that are kept as evidence."""


@dataclass(slots=True, kw_only=True)
class TraceTotals:
    """Sums over the steps of a trace.

    Attributes:
        expected_accepted: sum over drafting steps of what the verifier was expected to accept.
        ks: drafting steps by their K.
        cycles: durations by kind and batch size.
        rows: durations of drafting cycles by batch size and rows per request.
        far: durations of cycles that read no prompt by batch size, rows per request and logarithm
            of the context.
        texts: the first tokens of the trace by request, if the trace has token ids.
        stretches: acceptance of drafting steps by stretch and by properties of the steps.
        num_off: decode steps with K = 0.
        over_time: mean time of slices of the trace, their drafting steps, and how many of these
            accepted at least one token.
        refused: the present run of drafts that accept nothing, without first ones of requests.
        longest_refused: the longest of these runs.
        phases: for each of `NUMBERED` and of `PERIODS`, the drafts, and those that accept nothing,
            by the remainder of their number. First ones of requests are left out.
        num_pairs: decode steps whose previous step is in the trace.
        num_k_changes: how many of these pairs have different K.
        k_swing: sums over the pairs of twice the rises of K, and of K.
        num_k_rises: how many of the pairs have a larger K in the second step; at the end of a
            request K only falls.
        squares: sum over drafting steps of (accepted - expected) squared.
        num_empty: steps without a draft or prompt, not the last of a request, that emit nothing.
        num_contradictory: drafting steps, not the last of a request, that emit other than what they
            accept and one more token.
        excess: tests of whether more or less is accepted than expected.
        overlap: sum of acceptance_probability, and the number of steps that have it.
        requests: what a diagnosis needs of them.
        damage: the first places that cannot be read.
        limit: what ended the reading early; None if nothing did.
    """

    num_steps: int = 0
    num_tokens: int = 0
    expected_accepted: float = 0.0
    acceptance: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    ks: Counter[int] = field(default_factory=Counter)
    cycles: CyclesByKind = field(default_factory=CyclesByKind)
    rows: dict[tuple[int, ...], Seconds] = field(default_factory=dict)
    far: dict[tuple[int, ...], Seconds] = field(default_factory=dict)
    texts: dict[str, list[int]] = field(default_factory=dict)
    num_kept: int = 0
    stretches: Stretches = field(default_factory=Stretches)
    methods: Counter[str] = field(default_factory=Counter)
    drafting_steps: Counter[str] = field(default_factory=Counter)
    request_steps: Counter[str] = field(default_factory=Counter)
    num_off: int = 0
    over_time: list[tuple[float, int, int]] = field(default_factory=list)
    refused: RefusedRun = field(default_factory=RefusedRun)
    longest_refused: RefusedRun = field(default_factory=RefusedRun)
    phases: dict[tuple[int, str], Ints] = field(default_factory=dict)
    num_pairs: int = 0
    num_k_changes: int = 0
    num_k_rises: int = 0
    k_swing: tuple[int, int] = (0, 0)
    graph_hits: Counter[bool] = field(default_factory=Counter)
    squares: float = 0.0
    num_empty: int = 0
    num_contradictory: int = 0
    excess: ExcessTest = field(default_factory=ExcessTest)
    overlap: tuple[float, int] = (0.0, 0)
    headers: list[TraceHeader] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_damaged: int = 0
    damage: list[str] = field(default_factory=list)
    limit: str | None = None

    def add(self, piece: Piece) -> None:
        """Add steps, a header, a request or damage; sets `limit` where enough was read."""
        if isinstance(piece, StepBlock):
            self._add_block(piece)
            if self.num_steps >= MAX_STEPS:
                self.limit = f"{MAX_STEPS} steps"
            elif len(self.request_steps) >= MAX_REQUESTS:
                self.limit = f"{MAX_REQUESTS} requests"
        elif isinstance(piece, TraceHeader):
            if len(self.headers) < MAX_HEADERS:
                self.headers.append(piece)
        elif isinstance(piece, RequestRecord):
            if len(self.requests) < MAX_REQUESTS:
                self.requests.append(self._trimmed(piece))
        else:
            self.num_damaged += 1
            if len(self.damage) < MAX_NAMED_DAMAGE:
                self.damage.append(str(piece))
            if self.num_damaged >= MAX_DAMAGE:
                self.limit = f"{MAX_DAMAGE} places that cannot be read"

    def _trimmed(self, request: RequestRecord) -> RequestRecord:
        tokens = request.prompt_token_ids
        if tokens is not None:
            tokens = tokens[: max(0, MAX_PROMPT_TOKENS - self.num_prompt_tokens)]
            self.num_prompt_tokens += len(tokens)
        return replace(
            request,
            tags=tuple(tag[:MAX_WORD] for tag in request.tags[:MAX_TAGS]),
            parameters={
                name: value
                for name, value in request.parameters.items()
                if name in PARAMETERS and isinstance(value, str | int | float | None)
            },
            prompt_token_ids=tokens,
        )

    def _add_block(self, block: StepBlock) -> None:
        columns = block.columns  # K is the depth of a draft: of a tree, its budget counts nodes
        depth, is_tree = columns["depth_drafted"], columns["num_drafted"] > columns["depth_drafted"]
        k = np.where(is_tree, depth, columns["k_budget"])
        block = dataclass_replace(block, columns={**columns, "k_budget": k})
        self.num_steps += len(block.records)
        self.num_tokens += int(block.columns["num_emitted"].sum())
        self._add_cycles(block)
        self._add_records(block.records)
        in_order = chosen(block.columns, block.columns["num_drafted"] > 0)
        self._add_times(in_order)
        self._add_phases(in_order)
        steps = with_previous(block.columns)
        self._add_changes(steps)
        is_plain = (steps["num_drafted"] == 0) & (steps["num_prefill_rows"] == 0)
        is_empty = is_plain & (steps["num_emitted"] == 0) & steps["is_followed"]
        self.num_empty += int(is_empty.sum())
        drafting = chosen(steps, steps["num_drafted"] > 0)
        wrong = drafting["num_emitted"] != drafting["num_accepted"] + 1
        self.num_contradictory += int((wrong & drafting["is_followed"]).sum())
        if len(drafting["step"]):
            counts = (drafting[name].tolist() for name in ("depth_drafted", "num_accepted"))
            self.acceptance.steps.update(zip(*counts, strict=True))
            self.acceptance.num_drafted += int(drafting["num_drafted"].sum())
            self.expected_accepted += float(drafting["expected_accepted"].sum())
            self.ks.update(drafting["k_budget"].tolist())
            error = drafting["num_accepted"] - drafting["expected_accepted"]
            self.squares += float((error * error).sum())
            self.excess.add(drafting)
            self.stretches.add(drafting, block.names)

    def _add_cycles(self, block: StepBlock) -> None:
        cycles = chosen(block.columns, block.first)
        size, kind = cycles["size"], cycles["kind"]
        rows = cycles["batch_rows"] // size
        mean = np.add.reduceat(block.columns["context_tokens"], block.first) / size
        context = np.floor(2.0 * np.log2(mean + 1.0)).astype(np.int64)
        self.cycles.add(cycles)
        for sums, is_in, keys in (
            (self.rows, kind == DRAFTING, (size, rows)),
            (self.far, kind != PREFILL, (size, rows, context)),
        ):
            some = [key[is_in] for key in keys]
            for place, part in seconds_by(some, chosen(cycles, is_in), size[is_in]):
                sums.setdefault(place, Seconds()).include(part)

    def _add_records(self, records: Sequence[StepRecord]) -> None:
        """Add what is no number, or not known of every step."""
        overlap, num_known = self.overlap
        for record in records:
            if record.graph_hit is not None:
                self.graph_hits[record.graph_hit] += 1
            if not record.num_prefill_rows:
                self.request_steps[record.request_id] += 1
                self.num_off += not record.k_budget
            if record.num_drafted:
                self.methods[record.method] += 1
                self.drafting_steps[record.request_id] += 1
                if self.drafting_steps[record.request_id] > 1:
                    self._add_to_run(record)
                if record.acceptance_probability is not None:
                    overlap += record.acceptance_probability
                    num_known += 1
            if record.token_ids is not None and self.num_kept < KEPT:
                self.texts.setdefault(record.request_id, []).extend(record.token_ids)
                self.num_kept += len(record.token_ids)
        self.overlap = overlap, num_known

    def _add_changes(self, steps: Columns) -> None:
        pairs = chosen(steps, steps["previous_k"] >= 0)
        change = pairs["k_budget"] - pairs["previous_k"]
        moved, of = self.k_swing
        self.num_pairs += len(change)
        self.num_k_changes += int((change != 0).sum())
        self.num_k_rises += int(((change > 0) & (pairs["since_start"] > 1)).sum())
        # What falls has to rise again to swing; at the end of every request K only falls.
        rises = 2 * int(np.maximum(0, change)[pairs["since_start"] > 1].sum())
        self.k_swing = moved + rises, of + int(pairs["k_budget"].sum())

    def _add_times(self, drafting: Columns) -> None:
        times_s, accepted = drafting["t_s"], drafting["num_accepted"] > 0
        size = max(1, -(-len(times_s) // SLICES))
        for start in range(0, len(times_s), size):
            part = accepted[start : start + size]
            mean_s = float(times_s[start : start + size].mean())
            self.over_time.append((mean_s, len(part), int(part.sum())))

    def _add_phases(self, drafting: Columns) -> None:
        numbered = {
            **drafting,
            "draft": self.acceptance.num_steps + np.arange(len(drafting["step"])),
        }
        is_later = np.ones(len(drafting["step"]), np.bool_)
        is_later[np.unique(drafting["request"], return_index=True)[1]] = False
        later = chosen(numbered, is_later)
        is_refused = later["num_accepted"] == 0
        for period, (name, column) in product(PERIODS, NUMBERED.items()):
            phase = later[column] % period
            counted = np.stack(
                [np.bincount(p, minlength=period) for p in (phase, phase[is_refused])]
            )
            self.phases[period, name] = self.phases.get((period, name), 0) + counted

    def _add_to_run(self, step: StepRecord) -> None:
        if step.num_accepted:
            self.refused = RefusedRun()
            return
        self.refused.add(step)
        if self.refused.num_trials > self.longest_refused.num_trials:
            self.longest_refused = self.refused


def read_totals(path: Path) -> TraceTotals:
    """Read a trace, up to the limits; raises InvalidTrace if nothing of it can be read."""
    return collect_totals(read_trace(path))


def collect_totals(items: Iterable[Item], request_id: str | None = None) -> TraceTotals:
    """Return the totals of a trace, up to the limits, or of one request of it."""
    totals = TraceTotals()
    for piece in pieces_of(
        item
        for item in items
        if request_id is None or getattr(item, "request_id", None) == request_id
    ):
        totals.add(piece)
        if totals.limit:
            break
    return totals


def with_previous(columns: Columns) -> Columns:
    """Order steps by request and index, and append what came before each.

    `previous` is the outcome of the step before, `previous_k` its K; -1 where the step before is
    not the one before in its request. `since_start` counts steps since such a place. `paused` is
    AFTER_PAUSE where a step without a draft is among the last few, NO_RECENT_PAUSE where all steps
    since the request began, or since such a step, have drafted for a while, and -1 elsewhere.
    """
    order = np.lexsort((columns["step"], columns["request"]))
    steps = dict(chosen(columns, order))
    follows = np.zeros(len(order), np.bool_)
    follows[1:] = (np.diff(steps["request"]) == 0) & (np.diff(steps["step"]) == 1)
    accepted, depth = steps["num_accepted"], steps["depth_drafted"]
    outcome = np.where(accepted == depth, FULL, np.where(accepted == 0, NONE, PARTIAL))
    outcome = np.where(depth == 0, NO_PLACE, outcome)
    places = np.arange(len(order))
    start = np.maximum.accumulate(np.where(follows, 0, places))
    pause = np.maximum.accumulate(np.where(follows & (depth > 0), 0, places))
    since_pause = places - pause
    is_after = (since_pause <= SOON) & (pause > start)
    long_ago = np.where(since_pause > LONG, NO_RECENT_PAUSE, NO_PLACE)
    return steps | {
        "previous": np.where(follows, np.roll(outcome, 1), NO_PLACE),
        "previous_k": np.where(follows, np.roll(steps["k_budget"], 1), -1),
        "since_start": places - start,
        "is_followed": np.append(follows[1:], False),
        "paused": np.where(is_after, AFTER_PAUSE, long_ago),
    }
