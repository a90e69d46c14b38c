"""Traces as folders of Parquet files, and the steps of any trace as columns for statistics.

    trace.parquet/headers.jsonl            one header per line
    trace.parquet/steps/00000.parquet      step records, a part per flush
    trace.parquet/requests/00000.parquet   request records

A part appears under its name when it is whole. Data frame libraries and query engines read
`trace.parquet/steps` as one table. Parameters of a request, whose names differ from version to
version, are one column of JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from operator import attrgetter
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
import pyarrow.parquet as pq

from forerun.atomic_write import UNFINISHED, atomic_write
from forerun.bounded_documents import parquet_batches, parse_json
from forerun.bounded_read import ReadLimits, check_regular, first_line
from forerun.errors import InvalidTrace, UnreadableInput
from forerun.theory.record import RequestRecord, StepRecord, TraceHeader
from forerun.trace.schema import (
    COUNTS,
    DURATIONS,
    KINDS,
    MAX_COUNT,
    MAX_NODES,
    MAX_SECONDS,
    NODE_COUNTS,
    Damage,
    FlushRule,
    Item,
    JsonLines,
    Record,
    item_of,
    read_json_lines,
    record_from,
)

HEADERS = "headers.jsonl"
FOLDERS: Mapping[str, str] = {"steps": "step", "requests": "request"}
"""Which kind of record a folder holds."""
SUFFIX = ".parquet"
PART_LIMITS = ReadLimits(max_bytes=1 << 26, max_rows=2_000_000, max_seconds=120.0)
"""A writer puts some thousand rows into a part; other tools may join parts."""
JSON_TEXT = "dict[str, Json]"

TYPES: Mapping[str, pa.DataType] = {
    "int": pa.int64(),
    "float": pa.float64(),
    "str": pa.string(),
    "bool": pa.bool_(),
    JSON_TEXT: pa.string(),
    "tuple[int, ...]": pa.list_(pa.int64()),
    "tuple[float, ...]": pa.list_(pa.float64()),
    "tuple[str, ...]": pa.list_(pa.string()),
}
"""By annotation, for every annotation a step or request record has."""


class ParquetParts:
    """Writes records as numbered Parquet files in a folder."""

    flush_rule = FlushRule(num_records=4096, seconds=10.0)

    def __init__(self, folder: Path, headers: JsonLines) -> None:
        self.folder = folder
        self.headers = headers
        self.num_parts = dict.fromkeys(FOLDERS, 0)

    def write(self, records: Iterable[Record]) -> None:
        """Write one file per kind of record."""
        by_kind: dict[str, list[Record]] = {kind: [] for kind in KINDS}
        for record in records:
            by_kind[str(record.__struct_config__.tag)].append(record)
        if by_kind["header"]:
            self.headers.write(by_kind["header"])
        for name, kind in FOLDERS.items():
            if by_kind[kind]:
                self._write_part(name, _part_table(kind, by_kind[kind]))

    def close(self) -> None:
        """Do nothing: every file is closed once it is written."""
        self.headers.close()

    def _write_part(self, name: str, table: pa.Table) -> None:
        path = self.folder / name / f"{self.num_parts[name]:05}{SUFFIX}"
        with atomic_write(path, durable=False) as scratch:
            pq.write_table(table, scratch, write_page_checksum=True)
        self.num_parts[name] += 1


def _part_table(kind: str, records: Sequence[Record]) -> pa.Table:
    """Convert records of one kind to a table."""
    columns = {}
    for name, annotation in KINDS[kind].__annotations__.items():
        values: Iterable[object] = map(attrgetter(name), records)
        if annotation == JSON_TEXT:
            values = map(json.dumps, values)
        columns[name] = pa.array(values, TYPES[annotation.removesuffix(" | None")])
    return pa.table(columns)


def read_parquet(folder: Path, *, without: Sequence[str] = ()) -> Iterator[Item]:
    """Yield headers, steps, requests, and `Damage` for unreadable parts."""
    headers = folder / HEADERS
    if headers.exists():
        for item in read_json_lines(headers):
            if isinstance(item, Damage):
                yield Damage(where=f"{HEADERS} {item.where}", what=item.what)
            else:
                yield item
    else:
        yield Damage(where=HEADERS, what="missing")
    for name in FOLDERS:
        found = sorted((folder / name).iterdir()) if (folder / name).is_dir() else []
        yield from _missing_parts(name, found)
        for path in found:
            if name not in without or path.suffix == UNFINISHED:
                yield from _read_part(path, f"{name}/{path.name}")


MAX_DIGITS = 10
MAX_MISSING = 100
"""Missing parts that are named."""


def _missing_parts(name: str, found: Sequence[Path]) -> Iterator[Damage]:
    """Yield a `Damage` for every gap in the numbering of the files."""
    numbers = {
        int(path.stem)
        for path in found
        if path.suffix == SUFFIX and path.stem.isdecimal() and len(path.stem) < MAX_DIGITS
    }
    missing = (number for number in range(max(numbers, default=-1)) if number not in numbers)
    for number in islice(missing, MAX_MISSING):
        yield Damage(where=f"{name}/{number:05}{SUFFIX}", what="missing")


def _read_part(path: Path, where: str) -> Iterator[Item]:
    """Yield the valid records of one file, with `Damage` for others."""
    if path.suffix == UNFINISHED:
        yield Damage(where=where, what="was being written when the process ended")
        return
    kind = FOLDERS[path.parent.name]
    try:
        index = 0
        for batch in parquet_batches(path, limits=PART_LIMITS):
            for row in batch.to_pylist():
                yield _row_item(kind, row, f"{where} row {index}")
                index += 1
    except UnreadableInput as error:
        yield Damage(where=where, what=str(error).removeprefix(f"{path} "))


def _row_item(kind: str, row: dict[str, object], where: str) -> Item:
    """Convert a row to a record, or to `Damage` if it is not valid."""
    try:
        if kind == "request":
            row["parameters"] = parse_json(str(row.get("parameters")), "parameters")
        return record_from(kind, row)
    except ValueError as error:
        return Damage(where=where, what=f"{error!s:.300}")


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
    """Yield the content of a trace lazily: tables of steps, headers, requests and damage.

    Raises:
        InvalidTrace: it cannot be read.
    """
    try:
        yield from _parquet_pieces(path) if path.is_dir() else _json_pieces(path)
    except OSError as error:
        raise InvalidTrace(f"the trace {path} cannot be read: {error.strerror or error}") from error
    except UnreadableInput as error:
        raise InvalidTrace(f"the trace {error}") from error


def _parquet_pieces(folder: Path) -> Iterator[Piece]:
    """Yield tables of steps, then headers, requests and missing parts of a Parquet trace."""
    parts = sorted((folder / "steps").glob("*.parquet")) if (folder / "steps").is_dir() else []
    for path in parts:
        where = f"steps/{path.name}"
        try:
            for batch in parquet_batches(path, list(STEP_TYPES), PART_LIMITS):
                table = pa.Table.from_batches([batch]).select(list(STEP_TYPES))
                yield from checked(table.cast(pa.schema(list(STEP_TYPES.items()))), where)
        except (KeyError, ValueError, pa.ArrowException) as error:
            yield Damage(where=where, what=first_line(error).removeprefix(f"{path} "))
    yield from read_parquet(folder, without=("steps",))


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
