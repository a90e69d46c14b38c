"""Traces as folders of small Parquet files, each complete and readable once it is written.

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
from dataclasses import fields
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from forerun.atomic_write import UNFINISHED, atomic_write
from forerun.bounded_documents import parse_json
from forerun.bounded_parquet import parquet_batches
from forerun.bounded_read import ReadLimits
from forerun.errors import UnreadableInput
from forerun.trace.jsonl import JsonLines, read_json_lines
from forerun.trace.schema import FIELDS, KINDS, Damage, Item, Row, record_from
from forerun.trace.writer import FlushRule

__all__ = ["FOLDERS", "HEADERS", "PART_LIMITS", "ParquetParts", "read_parquet"]

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
    """Writes records as numbered Parquet files in a folder.

    Args:
        folder: of the trace; it exists.
        headers: where its headers go.
    """

    flush_rule = FlushRule(num_records=4096, seconds=10.0)

    def __init__(self, folder: Path, headers: JsonLines) -> None:
        self.folder = folder
        self.headers = headers
        self.num_parts = dict.fromkeys(FOLDERS, 0)

    def write(self, rows: Iterable[Row]) -> None:
        """Write one file per kind of record."""
        sorted_rows: dict[str, list[Row]] = {kind: [] for kind in KINDS}
        for row in rows:
            sorted_rows[row.kind].append(row)
        if sorted_rows["header"]:
            self.headers.write(sorted_rows["header"])
        for name, kind in FOLDERS.items():
            if sorted_rows[kind]:
                self._write_part(name, table_of(kind, sorted_rows[kind]))

    def close(self) -> None:
        """Do nothing: every file is closed once it is written."""
        self.headers.close()

    def _write_part(self, name: str, table: pa.Table) -> None:
        path = self.folder / name / f"{self.num_parts[name]:05}{SUFFIX}"
        with atomic_write(path, durable=False) as scratch:
            pq.write_table(table, scratch, write_page_checksum=True)
        self.num_parts[name] += 1


def table_of(kind: str, rows: Sequence[Row]) -> pa.Table:
    """Convert rows of one kind to a table."""
    columns = []
    by_field = zip(*(row.values for row in rows), strict=True)
    for field, values in zip(fields(KINDS[kind]), by_field, strict=True):
        annotation = str(field.type)
        column = map(json.dumps, values) if annotation == JSON_TEXT else values
        columns.append(pa.array(column, TYPES[annotation.removesuffix(" | None")]))
    return pa.Table.from_arrays(columns, names=FIELDS[kind])


def read_parquet(folder: Path, *, without: Sequence[str] = ()) -> Iterator[Item]:
    """Yield headers, steps, requests, and `Damage` for unreadable parts.

    Args:
        folder: of the trace.
        without: folders whose whole parts are not read; what is missing among them is still named.

    Raises:
        OSError: the folder cannot be read.
    """
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
        yield from missing_parts(name, found)
        for path in found:
            if name not in without or path.suffix == UNFINISHED:
                yield from read_part(path, f"{name}/{path.name}")


MAX_DIGITS = 10
MAX_MISSING = 100
"""Missing parts that are named."""


def missing_parts(name: str, found: Sequence[Path]) -> Iterator[Damage]:
    """Yield a `Damage` for every gap in the numbering of the files."""
    numbers = {
        int(path.stem)
        for path in found
        if path.suffix == SUFFIX and path.stem.isdecimal() and len(path.stem) < MAX_DIGITS
    }
    missing = (number for number in range(max(numbers, default=-1)) if number not in numbers)
    for number in islice(missing, MAX_MISSING):
        yield Damage(where=f"{name}/{number:05}{SUFFIX}", what="missing")


def read_part(path: Path, where: str) -> Iterator[Item]:
    """Yield the valid records of one file, with `Damage` for others."""
    if path.suffix == UNFINISHED:
        yield Damage(where=where, what="was being written when the process ended")
        return
    kind = FOLDERS[path.parent.name]
    try:
        index = 0
        for batch in parquet_batches(path, limits=PART_LIMITS):
            for row in batch.to_pylist():
                yield item_of(kind, row, f"{where} row {index}")
                index += 1
    except UnreadableInput as error:
        yield Damage(where=where, what=str(error).removeprefix(f"{path} "))


def item_of(kind: str, row: dict[str, object], where: str) -> Item:
    """Convert a row to a record, or to `Damage` if it is not valid."""
    try:
        if kind == "request":
            row["parameters"] = parse_json(str(row.get("parameters")), "parameters")
        return record_from(kind, row)
    except (OverflowError, ValueError) as error:
        return Damage(where=where, what=str(error))
