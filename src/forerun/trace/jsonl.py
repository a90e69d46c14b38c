"""Traces as JSON lines: one object per record, whose "record" says of which kind it is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from io import BufferedReader, RawIOBase
from pathlib import Path

from forerun.trace.schema import KINDS, Damage, Item, Row, record_from
from forerun.trace.writer import FlushRule

__all__ = ["JsonLines", "read_json_lines"]

KIND = "record"
ENCODER = json.JSONEncoder(separators=(",", ":"))
PLACES = {"int": "%d", "float": "%.9f"}

# A step's keys never change and most of its values are numbers, which need no encoder: filling a
# form takes a third of the time of encoding an object. Nine digits are a nanosecond; the clocks
# behind the times tell no more.
FORMS = {
    kind: f'{{"{KIND}":"{kind}",'
    + ",".join(f'"{field.name}":{PLACES.get(str(field.type), "%s")}' for field in fields(made))
    + "}\n"
    for kind, made in KINDS.items()
}
ENCODED = {
    kind: tuple(index for index, field in enumerate(fields(made)) if field.type not in PLACES)
    for kind, made in KINDS.items()
}
"""Which values of a row need the encoder."""

MAX_LINE_BYTES = 1 << 22
"""No record is as long; a damaged file need not have any line ends, and memory is finite."""


class JsonLines:
    """A sink of JSON lines.

    What is written is handed to the system at once, so it outlives the process.

    Args:
        file: unbuffered and open for writing.
    """

    flush_rule = FlushRule(num_records=256, seconds=1.0)

    def __init__(self, file: RawIOBase) -> None:
        self.file = file

    def write(self, rows: Iterable[Row]) -> None:
        """Append one line per row."""
        remaining = memoryview("".join(map(line_of, rows)).encode())
        while remaining:  # a file that is nearly full takes a part, and refuses the next
            remaining = remaining[self.file.write(remaining) or 0 :]

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def line_of(row: Row) -> str:
    """A row as its line."""
    values = [*row.values]
    for index in ENCODED[row.kind]:
        value = values[index]
        values[index] = "null" if value is None else ENCODER.encode(value)
    return FORMS[row.kind] % tuple(values)


def read_json_lines(path: Path) -> Iterator[Item]:
    """Records of a file in their order, and what is damaged between them.

    Raises:
        OSError: the file cannot be opened or read.
    """
    with path.open("rb") as file:
        number = offset = 0
        while line := file.readline(MAX_LINE_BYTES):
            number += 1
            where = f"line {number} (byte {offset})"
            offset += len(line)
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                offset += skip_line(file)
                yield Damage(where=where, what=f"longer than {MAX_LINE_BYTES} bytes")
            elif line.strip():
                yield item_of(line, where)


def skip_line(file: BufferedReader) -> int:
    """Read to the end of a line; returns how many bytes that took."""
    num_bytes = 0
    while rest := file.readline(MAX_LINE_BYTES):
        num_bytes += len(rest)
        if rest.endswith(b"\n"):
            break
    return num_bytes


def item_of(line: bytes, where: str) -> Item:
    """The record of a line, or what is wrong with it."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        ended = line.endswith(b"\n")
        return Damage(where=where, what="no JSON" if ended else "cut off in the middle")
    if not isinstance(values, dict):
        return Damage(where=where, what="no JSON object")
    try:
        return record_from(values.pop(KIND, None), values)
    except (OverflowError, ValueError) as error:
        return Damage(where=where, what=str(error))
