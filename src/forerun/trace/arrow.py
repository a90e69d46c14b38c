"""Steps of a trace as columns, for statistics over long traces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from forerun.bounded_read import check_regular
from forerun.errors import InvalidTrace, UnreadableInput
from forerun.theory.record import RequestRecord, StepRecord, TraceHeader
from forerun.trace.files import (
    COUNTS,
    DURATIONS,
    MAX_COUNT,
    MAX_NODES,
    MAX_SECONDS,
    NODE_COUNTS,
    Damage,
    item_of,
)

STEP_TYPES: Mapping[str, pa.DataType] = {
    **dict.fromkeys(
        (
            *("cycle_id", "step", "k_budget", "num_drafted", "depth_drafted", "num_accepted"),
            *("num_emitted", "batch_rows", "num_prefill_rows", "context_tokens"),
        ),
        pa.int64(),
    ),
    **dict.fromkeys(("t_s", "draft_s", "verify_s", "other_s", "expected_accepted"), pa.float64()),
    "request_id": pa.string(),
    "method": pa.string(),
    "acceptance_probability": pa.float64(),
    "graph_hit": pa.bool_(),
    "token_ids": pa.list_(pa.int64()),
}
OPTIONAL = frozenset({"acceptance_probability", "graph_hit", "token_ids"})
CHUNK_BYTES = 1 << 22
JSON_SCHEMA = pa.schema([("record", pa.string()), *STEP_TYPES.items()])

Piece: TypeAlias = pa.Table | TraceHeader | RequestRecord | Damage
"""A table of steps, or what else a trace holds."""


def read_columns(path: Path) -> Iterator[Piece]:
    """Yield the content of a trace lazily: tables of steps, headers, requests and damage."""
    try:
        yield from _json_pieces(path)
    except OSError as error:
        raise InvalidTrace(f"the trace {path} cannot be read: {error.strerror or error}") from error
    except UnreadableInput as error:
        raise InvalidTrace(f"the trace {error}") from error


def _json_pieces(path: Path) -> Iterator[Piece]:
    """Yield tables and records of a JSON lines trace, chunk by chunk."""
    check_regular(path)
    with path.open("rb") as file:
        number, rest = 1, b""
        while chunk := file.read(CHUNK_BYTES):
            whole, rest = cut(rest + chunk)
            lines = whole.splitlines(keepends=True)
            yield from _lines_pieces(lines, number)
            number += len(lines)
        yield from _lines_pieces(rest.splitlines(keepends=True), number)


def cut(data: bytes) -> tuple[bytes, bytes]:
    """Split data into complete lines and the incomplete last line."""
    end = data.rfind(b"\n") + 1
    if not end and len(data) > CHUNK_BYTES:
        return data, b""
    return data[:end], data[end:]


STEP = b'{"record":"step",'
"""How lines of our own steps begin."""


def _lines_pieces(lines: Sequence[bytes], first_line: int) -> Iterator[Piece]:
    """Yield the records in complete lines: steps as tables, other records one by one."""
    numbered = enumerate(lines, start=first_line)
    yield from one_by_one([(n, line) for n, line in numbered if not line.startswith(STEP)])
    steps = [line for line in lines if line.startswith(STEP)]
    if not steps:
        return
    try:
        table = pj.read_json(
            pa.BufferReader(b"".join(steps)),
            read_options=pj.ReadOptions(block_size=1 << 22),
            parse_options=pj.ParseOptions(
                explicit_schema=JSON_SCHEMA, unexpected_field_behavior="ignore"
            ),
        )
    except pa.ArrowException:
        table = None
    if table is None or table.num_rows != len(steps):  # damaged, or several objects on a line
        numbered = enumerate(lines, start=first_line)
        yield from one_by_one([(n, line) for n, line in numbered if line.startswith(STEP)])
        return
    yield from checked(table.select(list(STEP_TYPES)), f"lines from {first_line}")


def one_by_one(lines: Sequence[tuple[int, bytes]]) -> Iterator[Piece]:
    items = [item_of(line, f"line {number}") for number, line in lines if line.strip()]
    yield from (item for item in items if not isinstance(item, StepRecord))
    yield from table_of([item for item in items if isinstance(item, StepRecord)])


def table_of(steps: Sequence[StepRecord]) -> Iterator[pa.Table]:
    """Build a table of step records; None if there are none."""
    if steps:
        columns = {
            name: pa.array([getattr(step, name) for step in steps], kind)
            for name, kind in STEP_TYPES.items()
        }
        yield pa.table(columns)


def checked(table: pa.Table, where: str) -> Iterator[Piece]:
    """Yield the rows with valid values as a table, and `Damage` for all other rows."""
    good = pc.is_valid(table["cycle_id"])
    for name in STEP_TYPES:
        if name not in OPTIONAL:
            good = pc.and_(good, pc.is_valid(table[name]))
    order = ("num_accepted", "depth_drafted", "num_drafted")
    for less, more in pairwise(order):
        good = pc.and_kleene(good, pc.less_equal(table[less], table[more]))
    emitted = pc.less_equal(table["num_emitted"], pc.add(table["num_accepted"], 1))
    good = pc.and_kleene(good, emitted)
    for names, most in (
        (NODE_COUNTS, MAX_NODES),
        (COUNTS, MAX_COUNT),
        (DURATIONS, MAX_SECONDS),
        (("expected_accepted",), MAX_NODES),
    ):
        for name in names:  # a comparison with NaN is false
            within = pc.and_(pc.greater_equal(table[name], 0), pc.less_equal(table[name], most))
            good = pc.and_kleene(good, within)
    within = pc.less_equal(pc.abs(table["t_s"]), MAX_SECONDS)
    good = pc.and_kleene(good, within)
    kept = table.filter(good)
    if kept.num_rows < table.num_rows:
        bad = table.num_rows - kept.num_rows
        yield Damage(where=where, what=f"{bad} steps that lack a field or contradict themselves")
    if kept.num_rows:
        yield kept
