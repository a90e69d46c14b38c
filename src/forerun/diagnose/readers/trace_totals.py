"""Totals over the steps of a trace, and comparison of acceptance between groups of steps.

Both are computed from one block of columns at a time. A stretch is a run of consecutive steps of a
request.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from forerun.trace.summary import CyclesByKind, Seconds

MIN_REQUESTS = 8
STRETCH_STEPS = 64
"""Of a request where there are few of them: after so many steps its text has moved on."""
OUTCOMES = ("none", "partial", "full")
NO_RECENT_PAUSE, AFTER_PAUSE = "no_recent_pause", "after_pause"
PAUSES = (NO_RECENT_PAUSE, AFTER_PAUSE)
"""What came before a drafting step: only drafting steps for a while, or a plain step."""
NO_PLACE = -1
MIN_NEIGHBOURS = 3
"""Of a stretch, to say what the others of a step are like."""

Ints: TypeAlias = npt.NDArray[np.int64]
Reals: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StretchCounts:
    """Drafting steps counted by stretch of a request and by value of one property of the steps.

    Attributes:
        total: sum over them of the share of their draft that the verifier expected to accept.
        squares: sum of its squares.
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


EMPTY = StretchCounts(
    stretch=np.zeros(0, np.int64),
    place=np.zeros(0, np.int64),
    num_steps=np.zeros(0),
    num_first=np.zeros(0),
    total=np.zeros(0),
    squares=np.zeros(0),
)


@dataclass(slots=True, kw_only=True)
class Stretches:
    """Counts of drafting steps by stretch, for each property that is compared."""

    request_ids: list[str] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)
    parts: dict[str, list[StretchCounts]] = field(default_factory=dict)

    def add(self, drafting: pa.Table) -> None:
        """Count a block of drafting steps, ordered by request and step."""
        stretch, first = _stretch_of(drafting)
        share = _expected_share(drafting)
        accepted = (column(drafting, "num_accepted") > 0).astype(np.float64)
        rows = column(drafting, "batch_rows") // (column(drafting, "depth_drafted") + 1)
        around, outcome = _against_others(drafting, stretch, share)
        for name, place, values in (
            ("all", np.zeros_like(stretch), share),
            ("previous", outcome, around),
            ("paused", codes(drafting, "paused", PAUSES), share),
            ("context", bucket(column(drafting, "context_tokens")), share),
            ("index", bucket(column(drafting, "step")), share),
            ("company", (rows >= 2).astype(np.int64), share),
        ):
            counted = counts(stretch + len(self.request_ids), place, accepted, values)
            self.parts.setdefault(name, []).append(counted)
        self.request_ids += drafting["request_id"].take(pa.array(first)).to_pylist()
        self.starts_s += drafting["t_s"].take(pa.array(first)).to_pylist()

    def by(self, name: str) -> StretchCounts:
        return StretchCounts.joined(self.parts.get(name, [EMPTY]))


def column(table: pa.Table, name: str) -> Ints:
    found: Ints = table[name].to_numpy().astype(np.int64)
    return found


def codes(table: pa.Table, name: str, words: Sequence[str]) -> Ints:
    indices = pc.fill_null(pc.index_in(table[name], value_set=pa.array(words)), NO_PLACE)
    found: Ints = indices.to_numpy().astype(np.int64)
    return found


def bucket(values: Ints) -> Ints:
    """Return the base-4 logarithm of each value plus 1, rounded down."""
    found: Ints = np.floor(np.log2(values + 1.0) / 2.0).astype(np.int64)
    return found


def _stretch_of(drafting: pa.Table) -> tuple[Ints, Ints]:
    names = drafting["request_id"].combine_chunks().dictionary_encode()
    request = names.indices.to_numpy()
    part = column(drafting, "step") // STRETCH_STEPS
    if len(names.dictionary) >= MIN_REQUESTS:
        part = np.zeros_like(part)
    begins = np.ones(len(part), np.bool_)
    begins[1:] = (request[1:] != request[:-1]) | (part[1:] != part[:-1])
    return np.cumsum(begins) - 1, np.flatnonzero(begins)


def _expected_share(drafting: pa.Table) -> Reals:
    """Return the expected accepted share of each draft, corrected for the draft's depth.

    The expectation is over the verifier's own draws, so it scatters less than what was accepted. A
    deeper draft has a lower share of the same text; that is taken off.
    """
    depth = column(drafting, "depth_drafted")
    expected = drafting["expected_accepted"].to_numpy().astype(np.float64)
    share: Reals = np.minimum(1.0, expected / depth)
    means = np.bincount(depth, share) / np.maximum(1.0, np.bincount(depth))
    levelled: Reals = share + share.mean() - means[depth]
    return levelled


def _against_others(drafting: pa.Table, stretch: Ints, share: Reals) -> tuple[Reals, Ints]:
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
    outcome = np.where(known, codes(drafting, "previous", OUTCOMES), NO_PLACE)
    return share - others, outcome


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
"""On either side; from fewer it cannot be told how much stretches differ anyway."""
NO_FALL = 0.1
"""Of the draft: a difference that is surely smaller is none."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Counts and mean acceptance of one of the two groups of steps in a `Comparison`.

    Attributes:
        mean: of their shares; of what they exceed others by, where those are compared.
    """

    num_steps: int
    num_stretches: int
    mean: float
    num_first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The difference of acceptance between two groups of steps."""

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

    def is_lower(self, least: float, chance: float) -> bool | None:
        """Whether acceptance is lower in the second group; None if the test does not decide it."""
        if self.difference >= least and self.t >= student_quantile(1.0 - chance, self.freedom):
            return True
        return False if self.difference + 2.0 * self.error < NO_FALL else None


def compare(places: StretchCounts, high: Mask, low: Mask) -> Comparison | None:
    """Compare two groups of steps; None where either has too few.

    The error is the larger of two: by the scatter between stretches, which is right however steps
    of one hang together but vague where there are few, and by that between steps.
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
    """Compute the counts and the mean acceptance of one group of steps."""
    num_steps = int(places.num_steps[mask].sum())
    return Side(
        num_steps=num_steps,
        num_stretches=len(np.unique(places.stretch[mask])),
        mean=float(places.total[mask].sum()) / max(1, num_steps),
        num_first=int(places.num_first[mask].sum()),
    )


def student_quantile(probability: float, freedom: float) -> float:
    """Return a quantile of Student's t (Cornish-Fisher), slightly low below four degrees."""
    z = NormalDist().inv_cdf(probability)
    first = (z**3 + z) / (4.0 * freedom)
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / (96.0 * freedom**2)
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / (384.0 * freedom**3)
    return z + first + second + third


SOON, LONG = 2, 5
"""Drafting steps after a plain one that it may affect, and after which it should not any more."""
KEPT = 50_000
"""Tokens that are looked at: enough to see whether a text repeats itself."""
SLICES = 16
"""Points in time that a block gives: enough to see when something changed."""


PAUSING = frozenset({"suffix"})
"""Drafters that draft nothing where the text does not repeat itself, at any K."""


@dataclass(slots=True, kw_only=True)
class TraceTotals:
    """Sums over the steps of a trace.

    Attributes:
        acceptance: steps per (K, depth drafted, accepted, drafted nodes), drafting ones only.
        cycles: by kind and number of requests in them.
        rows: of drafting cycles by requests and rows per request.
        far: of plain and drafting cycles by requests, rows per request and logarithm of context.
        texts: the first tokens of the trace by request, where it has them.
        stretches: acceptance of drafting steps by what they are like.
        num_off: decode steps for which nothing was to be drafted (K = 0).
        over_time: mean time of slices of the trace, their drafting steps, and how many of these
            accepted at least one token.
        num_k_changes: those of them whose K differs.
        k_swing: sum over them of the change of K, and of K.
        num_k_rises: those of them whose K is larger; at the end of a request K only falls.
        expected: sum of expected_accepted over drafting steps.
        squares: sum over them of (accepted - expected) squared.
        overlap: sum of acceptance_probability, and of how many steps.
    """

    num_steps: int = 0
    num_tokens: int = 0
    acceptance: Counter[tuple[int, int, int, int]] = field(default_factory=Counter)
    cycles: CyclesByKind = field(default_factory=CyclesByKind)
    rows: dict[tuple[int, int], Seconds] = field(default_factory=dict)
    far: dict[tuple[int, int, int], Seconds] = field(default_factory=dict)
    texts: dict[str, list[int]] = field(default_factory=dict)
    num_kept: int = 0
    stretches: Stretches = field(default_factory=Stretches)
    methods: Counter[str] = field(default_factory=Counter)
    drafting_steps: Counter[str] = field(default_factory=Counter)
    request_steps: Counter[str] = field(default_factory=Counter)
    num_off: int = 0
    over_time: list[tuple[float, int, int]] = field(default_factory=list)
    num_pairs: int = 0
    num_k_changes: int = 0
    num_k_rises: int = 0
    k_swing: tuple[int, int] = (0, 0)
    graph_hits: Counter[bool] = field(default_factory=Counter)
    expected: float = 0.0
    squares: float = 0.0
    overlap: tuple[float, int] = (0.0, 0)

    def add(self, steps: pa.Table) -> None:
        """Add a block of steps that contains only complete cycles."""
        if not steps.num_rows:
            return
        self.num_steps += steps.num_rows
        self.num_tokens += pc.sum(steps["num_emitted"]).as_py()
        self._add_cycles(steps)
        self._add_graphs(steps)
        self._add_texts(steps)
        self._add_requests(steps)
        steps = with_previous(steps)
        self._add_changes(steps)
        drafting = steps.filter(pc.greater(steps["num_drafted"], 0))
        if drafting.num_rows:
            self._add_acceptance(drafting)
            self._add_times(drafting)
            self.stretches.add(drafting)
            _add_values(self.methods, drafting["method"])
            _add_values(self.drafting_steps, drafting["request_id"])

    def _add_acceptance(self, drafting: pa.Table) -> None:
        keys = ["k_budget", "depth_drafted", "num_accepted", "num_drafted"]
        for row in drafting.group_by(keys).aggregate([([], "count_all")]).to_pylist():
            self.acceptance[
                row["k_budget"], row["depth_drafted"], row["num_accepted"], row["num_drafted"]
            ] += row["count_all"]
        error = pc.subtract(drafting["num_accepted"], drafting["expected_accepted"])
        self.expected += pc.sum(drafting["expected_accepted"]).as_py()
        self.squares += pc.sum(pc.multiply(error, error)).as_py()
        known = drafting["acceptance_probability"].drop_null()
        if len(known):
            total, count = self.overlap
            self.overlap = (total + pc.sum(known).as_py(), count + len(known))

    def _add_cycles(self, steps: pa.Table) -> None:
        cycles = steps.group_by(["cycle_id", "t_s"]).aggregate(
            [
                ([], "count_all"),
                *((name, "max") for name in ("draft_s", "verify_s", "other_s", "batch_rows")),
                ("num_prefill_rows", "max"),
                ("num_drafted", "sum"),
                ("context_tokens", "mean"),
            ]
        )
        reads, drafts = (
            pc.greater(cycles["num_prefill_rows_max"], 0),
            pc.greater(cycles["num_drafted_sum"], 0),
        )
        kind = pc.if_else(reads, "prefill", pc.if_else(drafts, "drafting", "plain"))
        per_request = pc.divide(cycles["batch_rows_max"], cycles["count_all"])
        cycles = cycles.append_column("kind", kind).append_column("rows", per_request)
        cycles = cycles.append_column("size", cycles["count_all"]).drop_columns(["count_all"])
        sums = [(f"{name}_max", "sum") for name in ("draft_s", "verify_s", "other_s")]
        cycles = cycles.append_column("context", _log_bucket(cycles["context_tokens_mean"]))
        keys = ["kind", "size", "rows", "context"]
        for row in cycles.group_by(keys).aggregate([([], "count_all"), *sums]).to_pylist():
            self._add_seconds(row)

    def _add_seconds(self, row: Mapping[str, Any]) -> None:
        kind, num_rows = row["kind"], int(row["rows"])
        size, num_cycles = int(row["size"]), int(row["count_all"])
        part = Seconds(
            num_cycles=num_cycles,
            num_steps=num_cycles * size,
            draft_s=row["draft_s_max_sum"],
            verify_s=row["verify_s_max_sum"],
            other_s=row["other_s_max_sum"],
        )
        self.cycles.places[kind, size].include(part)
        if kind == "drafting":
            self.rows.setdefault((size, num_rows), Seconds()).include(part)
        if kind != "prefill":
            place = size, num_rows, int(row["context"])
            self.far.setdefault(place, Seconds()).include(part)

    def _add_texts(self, steps: pa.Table) -> None:
        known = steps.filter(pc.is_valid(steps["token_ids"])) if self.num_kept < KEPT else steps[:0]
        for name, tokens in zip(
            known["request_id"].to_pylist(), known["token_ids"].to_pylist(), strict=True
        ):
            self.texts.setdefault(name, []).extend(tokens)
            self.num_kept += len(tokens)
            if self.num_kept >= KEPT:
                break

    def _add_graphs(self, steps: pa.Table) -> None:
        _add_values(self.graph_hits, steps["graph_hit"].drop_null())

    def _add_requests(self, steps: pa.Table) -> None:
        decoding = steps.filter(pc.equal(steps["num_prefill_rows"], 0))
        _add_values(self.request_steps, decoding["request_id"])
        self.num_off += decoding.filter(pc.equal(decoding["k_budget"], 0)).num_rows

    def _add_changes(self, steps: pa.Table) -> None:
        pairs = steps.select(["k_budget", "previous_k", "since_start"]).drop_null()
        if not pairs.num_rows:
            return
        change = pc.subtract(pairs["k_budget"], pairs["previous_k"])
        risen = pc.and_(pc.greater(change, 0), pc.greater(pairs["since_start"], 1))
        moved, of = self.k_swing
        self.num_pairs += pairs.num_rows
        self.num_k_changes += pc.sum(pc.not_equal(change, 0)).as_py()
        self.num_k_rises += pc.sum(risen).as_py()
        self.k_swing = (
            moved + pc.sum(pc.abs(change)).as_py(),
            of + pc.sum(pairs["k_budget"]).as_py(),
        )

    def _add_times(self, drafting: pa.Table) -> None:
        size = -(-drafting.num_rows // SLICES)
        for start in range(0, drafting.num_rows, size):
            part = drafting.slice(start, size)
            accepted = part["num_accepted"]
            first = pc.sum(pc.greater(accepted, 0)).as_py()
            self.over_time.append((pc.mean(part["t_s"]).as_py(), part.num_rows, first))


def with_previous(steps: pa.Table) -> pa.Table:
    """Order steps by request and index, and append the outcome of the previous step."""
    steps = steps.sort_by([("request_id", "ascending"), ("step", "ascending")])
    before = steps.slice(0, max(steps.num_rows - 1, 0))
    after = steps.slice(1)
    follows = pc.and_(
        pc.equal(before["request_id"], after["request_id"]),
        pc.equal(pc.add(before["step"], 1), after["step"]),
    )
    accepted, depth = before["num_accepted"], before["depth_drafted"]
    part = pc.if_else(pc.equal(accepted, depth), "full", "partial")
    outcome = pc.if_else(
        pc.equal(depth, 0), "plain", pc.if_else(pc.equal(accepted, 0), "none", part)
    )
    previous = pc.if_else(follows, outcome, pa.scalar(None, pa.string()))
    previous_k = pc.if_else(follows, before["k_budget"], pa.scalar(None, pa.int64()))
    steps = steps.append_column("previous", _after_nothing(previous, pa.string())).append_column(
        "previous_k", _after_nothing(previous_k, pa.int64())
    )
    return _with_pauses(steps)


def _with_pauses(steps: pa.Table) -> pa.Table:
    """Append each step's index in its request, and whether a plain step came shortly before.

    AFTER_PAUSE where one is among the last few, NO_RECENT_PAUSE where all steps since the request
    began, or since a plain step, have drafted for a while; None in between and at the beginning.
    """
    places = pa.array(range(steps.num_rows), pa.int64())
    begins = pc.is_null(steps["previous"]).combine_chunks()
    plain = pc.equal(steps["depth_drafted"], 0).combine_chunks()
    start = pc.cumulative_max(pc.if_else(begins, places, 0))
    pause = pc.cumulative_max(pc.if_else(pc.or_(plain, begins), places, 0))
    since_start, since_pause = pc.subtract(places, start), pc.subtract(places, pause)
    is_after = pc.and_(pc.less_equal(since_pause, SOON), pc.greater(pause, start))
    is_long_ago = pc.greater(since_pause, LONG)
    paused = pc.if_else(
        is_after,
        pa.scalar(AFTER_PAUSE),
        pc.if_else(is_long_ago, pa.scalar(NO_RECENT_PAUSE), pa.scalar(None, pa.string())),
    )
    return steps.append_column("since_start", since_start).append_column("paused", paused)


def _after_nothing(values: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    return pa.chunked_array([pa.nulls(1, kind), *values.chunks], kind)


def _log_bucket(values: pa.ChunkedArray) -> pa.ChunkedArray:
    floor = pc.floor(pc.multiply(pc.log2(pc.add(values, 1).cast(pa.float64())), 2.0))
    return pc.cast(floor, pa.int64())


def _add_values(counter: Counter[Any], values: pa.ChunkedArray) -> None:
    for value in pc.value_counts(values).to_pylist():
        counter[value["values"]] += value["counts"]
