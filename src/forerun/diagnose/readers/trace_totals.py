"""Totals over the steps of a trace, computed from one block of columns at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from forerun.diagnose.readers.trace_stretches import AFTER_PAUSE, NO_RECENT_PAUSE, Stretches

SOON, LONG = 2, 5
"""Drafting steps after a plain one that it may affect, and after which it should not any more."""
KEPT = 50_000
"""Tokens that are looked at: enough to see whether a text repeats itself."""
SLICES = 16
"""Points in time that a block gives: enough to see when something changed."""


@dataclass(slots=True)
class Seconds:
    """Seconds of all cycles of one kind, split into drafting, target pass and rest."""

    num_cycles: int = 0
    num_steps: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s


PAUSING = frozenset({"suffix"})
"""Drafters that draft nothing where the text does not repeat itself, at any K."""


@dataclass(slots=True, kw_only=True)
class TraceTotals:
    """Sums over the steps of a trace.

    Attributes:
        acceptance: steps per (K, depth drafted, accepted, drafted nodes), drafting ones only.
        cycles: by kind (plain, drafting, prefill) and number of requests in them.
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
    cycles: dict[tuple[str, int], Seconds] = field(default_factory=dict)
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
        kind, num_rows = str(row["kind"]), int(row["rows"])
        size, num_cycles = int(row["size"]), int(row["count_all"])
        places = [self.cycles.setdefault((kind, size), Seconds())]
        if kind == "drafting":
            places.append(self.rows.setdefault((size, num_rows), Seconds()))
        if kind != "prefill":
            place = size, num_rows, int(row["context"])
            places.append(self.far.setdefault(place, Seconds()))
        for total in places:
            total.num_cycles += num_cycles
            total.num_steps += num_cycles * size
            total.draft_s += row["draft_s_max_sum"]
            total.verify_s += row["verify_s_max_sum"]
            total.other_s += row["other_s_max_sum"]

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


def merged(parts: Sequence[Seconds]) -> Seconds:
    """Sum the cycles of several batch sizes."""
    return Seconds(
        num_cycles=sum(part.num_cycles for part in parts),
        num_steps=sum(part.num_steps for part in parts),
        draft_s=math.fsum(part.draft_s for part in parts),
        verify_s=math.fsum(part.verify_s for part in parts),
        other_s=math.fsum(part.other_s for part in parts),
    )
