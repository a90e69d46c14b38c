"""Watches the counters of a server, or a trace that grows: change points with likely causes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from os import fstat
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from forerun.bounded_read import check_regular
from forerun.doctor.diagnosis import as_reference, diagnose
from forerun.doctor.evidence import Evidence, Reading, merge
from forerun.doctor.readers.prometheus import (
    CYCLE_SECONDS,
    POSITIONS,
    Metrics,
    metrics_of,
)
from forerun.errors import InvalidRequest, UnreadableInput
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.record import RequestRecord, StepRecord
from forerun.trace.change_points import ChangePoint, Cusum, watch_position
from forerun.trace.files import MAX_LINE_BYTES, Damage, item_of

MAX_CHANGES = 100
"""Change points that a state keeps, the latest ones."""
MAX_CAUSES = 3
MIN_REQUESTS = 20.0
_PER_TOKEN = "vllm:request_time_per_output_token_seconds"
_PER_TOKEN_SGLANG = "sglang:time_per_output_token_seconds"
_TIMES = (
    (f"{_PER_TOKEN}_sum", f"{_PER_TOKEN}_count", MIN_REQUESTS),
    (f"{_PER_TOKEN_SGLANG}_sum", f"{_PER_TOKEN_SGLANG}_count", MIN_REQUESTS),
    ("llamacpp:tokens_predicted_seconds", "llamacpp:tokens_predicted", 2000.0),
    ("forerun:step_seconds", "forerun:step_tokens", 2000.0),
)
"""Seconds and what they are divided by: requests or tokens, and how many make a batch."""
_PROMPTS = (
    ("vllm:request_prompt_tokens_sum", "vllm:request_prompt_tokens_count", MIN_REQUESTS),
    ("sglang:prompt_tokens", "sglang:num_requests", MIN_REQUESTS),
)
_GAUGE = "sglang:spec_accept_length"
_GAUGE_POLLS = 6.0
_LINES = 256  # of a trace, counted together; few, so that a long trace fills many CUSUM batches
_LAST_BYTES = 4096  # hashed at the end of what was read, to notice that a trace was replaced
TIME_PER_TOKEN = "time per output token (s)"
TIME_OVER_TARGET = "time per output token (s), against its target,"
PROMPT_TOKENS = "prompt tokens per request"


class WatchState(Struct, kw_only=True, forbid_unknown_fields=True):
    """The saved state of a watch, which continues after restarts of the watch or of the server.

    Attributes:
        source: what is watched; a state belongs to one source.
        last: counters at the latest reading; a counter that is smaller at the next was reset.
        usual: counts since the watch began or the latest change, without those of `recent`.
        recent: counts since the first deviation of a figure.
        unsent: changes that the web hook has not accepted yet.
        num_failed: readings in a row that failed.
        num_read_bytes: bytes read of a trace, up to its last complete line; None before reading.
        last_hash: hash of the last of these bytes, which differs if the file was replaced.
    """

    source: str
    last: Metrics | None = None
    usual: Metrics = msgspec.field(default_factory=Metrics)
    recent: Metrics = msgspec.field(default_factory=Metrics)
    series: dict[str, Cusum] = {}
    changes: list[ChangePoint] = []
    unsent: list[ChangePoint] = []
    num_changes: int = 0
    num_failed: int = 0
    num_read_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None = None
    last_hash: str = ""


def observe(
    state: WatchState, metrics: Metrics, at_s: float, target_s: float | None
) -> list[ChangePoint]:
    """Add a reading to the state; returns the changes that it shows.

    Args:
        state: state of the watch, which is updated.
        metrics: metrics of the page.
        at_s: Unix time.
        target_s: time per output token that should not be exceeded; None for none.
    """
    if not metrics.totals:  # a server that was just started may have few
        raise InvalidRequest(f"{state.source} holds no metric of an engine that is known")
    last, state.last, state.num_failed = state.last, metrics, 0
    return [] if last is None else _add_growth(state, metrics.since(last), at_s, target_s)


def observe_trace(state: WatchState, path: Path, target_s: float | None) -> list[ChangePoint]:
    """Add the lines that a trace has gained; returns the changes that they show, at their times.

    A file that was truncated or replaced is read from its start.

    Raises InvalidRequest where it cannot be read, or holds no record at all.
    """
    try:
        check_regular(path)
        with path.open("rb") as file:
            if _hash_before(file, state.num_read_bytes or 0) != state.last_hash:
                state.num_read_bytes = 0
            start = file.seek(state.num_read_bytes or 0)
            pieces = [*_pieces(file)]
            state.num_read_bytes = start + sum(piece.num_bytes for piece in pieces)
            state.last_hash = _hash_before(file, state.num_read_bytes)
            written_s = fstat(file.fileno()).st_mtime
    except (OSError, UnreadableInput) as error:
        raise InvalidRequest(f"the trace {path} cannot be read: {error}") from error
    if pieces and not start and not any(piece.num_records for piece in pieces):
        raise InvalidRequest(f"{path} holds no record of a trace")
    state.num_failed = 0
    clocks_s = [piece.clock_s for piece in pieces if piece.clock_s is not None]
    found = []
    for piece in pieces:
        age_s = 0.0 if piece.clock_s is None else clocks_s[-1] - piece.clock_s
        found += _add_growth(state, piece.grown, written_s - age_s, target_s)
    return found


def _hash_before(file: BinaryIO, end: int) -> str:
    start = file.seek(max(0, end - _LAST_BYTES))
    return blake2b(file.read(end - start), digest_size=16).hexdigest()


class _Piece(Struct, frozen=True, kw_only=True):
    """Consecutive lines of a trace: their counts, and the engine's clock at the last step."""

    num_bytes: int
    num_records: int
    grown: Metrics
    clock_s: float | None


def _pieces(file: BinaryIO) -> Iterator[_Piece]:
    for lines in _batches(file):
        records = [item for line in lines if not isinstance(item := item_of(line, ""), Damage)]
        steps = [record for record in records if isinstance(record, StepRecord)]
        yield _Piece(
            num_bytes=sum(map(len, lines)),
            num_records=len(records),
            grown=_counters(steps, [r for r in records if isinstance(r, RequestRecord)]),
            clock_s=steps[-1].t_s if steps else None,
        )


def _batches(file: BinaryIO) -> Iterator[list[bytes]]:
    """Yield complete lines, some at a time; an unfinished last line is left for later.

    Of a line that is too long the parts are yielded, which hold no record.
    """
    lines, num_bytes = list[bytes](), 0
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) < MAX_LINE_BYTES and not line.endswith(b"\n"):
            break
        lines.append(line)
        num_bytes += len(line)
        if len(lines) == _LINES or num_bytes >= MAX_LINE_BYTES:
            yield lines
            lines, num_bytes = [], 0
    if lines:
        yield lines


def _counters(steps: Sequence[StepRecord], requests: Sequence[RequestRecord]) -> Metrics:
    """Return the counters that forerun's /metrics page would show for these records."""
    counts = AcceptanceCounts.from_records(step for step in steps if step.num_drafted)
    cycles = {step.cycle_id: step for step in steps}.values()
    decoding = [step for step in steps if step.step]  # the first one reads the prompt
    return Metrics(
        totals={
            "vllm:spec_decode_num_drafts": counts.num_steps,
            "vllm:spec_decode_num_draft_tokens": counts.num_drafted,
            "vllm:spec_decode_num_accepted_tokens": counts.num_accepted,
            "vllm:request_prompt_tokens_sum": sum(r.num_prompt_tokens for r in requests),
            "vllm:request_prompt_tokens_count": len(requests),
            "forerun:cycles": len(cycles),
            "forerun:sequence_steps": len(steps),
            f"{CYCLE_SECONDS}:draft": sum(step.draft_s for step in cycles),
            f"{CYCLE_SECONDS}:verify": sum(step.verify_s for step in cycles),
            f"{CYCLE_SECONDS}:other": sum(step.other_s for step in cycles),
            "forerun:step_seconds": sum(s.draft_s + s.verify_s + s.other_s for s in decoding),
            "forerun:step_tokens": sum(step.num_emitted for step in decoding),
        },
        positions={
            name: {place: float(count) for place, count in enumerate(counts_by_place)}
            for name, counts_by_place in (
                ("vllm:spec_decode_num_accepted_tokens_per_pos", counts.accepted_per_position),
                ("forerun:drafted_per_position", counts.drafted_per_position),
            )
            if counts_by_place
        },
    )


def _add_growth(
    state: WatchState, grown: Metrics, at_s: float, target_s: float | None
) -> list[ChangePoint]:
    found = [
        *_acceptance_changes(state.series, grown, at_s),
        *_figure_changes(state.series, grown, at_s, target_s),
    ]
    state.recent.include(grown)
    if found:
        found = [replace(change, causes=causes_of(change, state)) for change in found]
        state.usual, state.recent = Metrics(), Metrics()
    elif all(cusum.started_s is None for cusum in state.series.values()):
        state.usual.include(state.recent)
        state.recent = Metrics()
    state.changes = [*state.changes, *found][-MAX_CHANGES:]
    state.num_changes += len(found)
    return found


def _acceptance_changes(series: dict[str, Cusum], grown: Metrics, at_s: float) -> list[ChangePoint]:
    tally = metrics_of(grown)
    if drafts := tally.counts.get("num_drafts"):
        known = [name for name in grown.positions if POSITIONS.get(name) == "drafted"]
        drafted = grown.positions[min(known)] if known else {}
        return [
            change
            for place, count in enumerate(tally.per_position)
            for change in watch_position(series, place + 1, count, drafted.get(place, drafts), at_s)
        ]
    length = grown.totals.get(_GAUGE, 0.0)  # SGLang counts no positions
    if length <= 0.0:
        return []
    name = "acceptance length"
    cusum = series.setdefault(name, Cusum(min_size=_GAUGE_POLLS, is_log=True))
    change = cusum.add(name, length, 1.0, at_s)
    return [] if change is None else [change]


def _figures(metrics: Metrics) -> Iterator[tuple[str, float, float, float]]:
    for name, pairs in ((TIME_PER_TOKEN, _TIMES), (PROMPT_TOKENS, _PROMPTS)):
        for over, under, size in pairs:
            if over in metrics.totals and under in metrics.totals:
                yield name, metrics.totals[over], metrics.totals[under], size
                break


def _figure_changes(
    series: dict[str, Cusum], grown: Metrics, at_s: float, target_s: float | None
) -> Iterator[ChangePoint]:
    for name, over, under, size in _figures(grown):
        levels: dict[str, float | None] = {name: None}
        if name == TIME_PER_TOKEN and target_s is not None:
            levels[TIME_OVER_TARGET] = target_s
        for label, level in levels.items():
            cusum = series.setdefault(label, Cusum(min_size=size, is_log=True))
            cusum.level = level
            found = cusum.add(label, over, under, at_s)
            if found is not None:
                yield found


def causes_of(change: ChangePoint, state: WatchState) -> tuple[str, ...]:
    """Return the labels that a diagnosis of the time since the change finds likeliest."""
    now = Evidence(readings=[Reading(source="since the change")])
    before = Evidence(readings=[Reading(source="before the change")])
    metrics_of(state.recent).add_to(now, "since the change")
    metrics_of(state.usual).add_to(before, "before the change")
    if change.series.startswith("acceptance") and change.now < change.before:
        now.note("acceptance_dropped", True, change.words)
    if change.series in (TIME_PER_TOKEN, TIME_OVER_TARGET) and change.now > change.before:
        now.note("slowed_down", True, change.words)
    if change.series == PROMPT_TOKENS:
        now.note("changed", ["traffic"], change.words)
    return tuple(
        ranked.scored.cause.label
        for ranked in diagnose(merge(now, as_reference(before))).causes[:MAX_CAUSES]
        if ranked.scored.cause.label != "healthy"
    )


def watch_text(state: WatchState) -> str:
    """Return the state in Prometheus's text format."""
    lines = [
        "# TYPE forerun_watch_change_points_total counter",
        f"forerun_watch_change_points_total {state.num_changes}",
        "# TYPE forerun_watch_failed_readings gauge",
        f"forerun_watch_failed_readings {state.num_failed}",
        "# TYPE forerun_watch_last_change_seconds gauge",
    ]
    latest: Mapping[str, ChangePoint] = {change.series: change for change in state.changes}
    lines += [
        f'forerun_watch_last_change_seconds{{series="{name}"}} {change.noticed_s:.0f}'
        for name, change in latest.items()
    ]
    lines.append("# TYPE forerun_watch_deviation gauge")
    lines += [
        f'forerun_watch_deviation{{series="{name}"}} {max(cusum.up, cusum.down):.3f}'
        for name, cusum in state.series.items()
    ]
    return "\n".join(lines) + "\n"
