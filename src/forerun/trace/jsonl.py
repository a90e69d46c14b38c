"""Traces as JSON lines, one object per record with its kind in the field "record"."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import lru_cache
from io import BufferedReader, RawIOBase
from operator import itemgetter
from pathlib import Path

from forerun.bounded_documents import parse_json
from forerun.bounded_read import check_regular
from forerun.errors import UnreadableInput
from forerun.theory.record import Json, StepRecord
from forerun.trace.schema import FIELDS, Damage, Item, Row, record_from
from forerun.trace.writer import FlushRule

__all__ = ["JsonLines", "read_json_lines"]

KIND = "record"
ENCODER = json.JSONEncoder(separators=(",", ":"))

# Steps are what a trace is made of. Their keys never change, their numbers need no encoder, and
# their words are mostly those of the step before: filling a form takes a third of the time of
# encoding an object. Nine digits are a nanosecond; the clocks behind the times tell no more.
PLACES = {"int": "%d", "float": "%.9f"}
NUMBERS = [i for i, field in enumerate(fields(StepRecord)) if field.type in PLACES]
WORDS = [i for i, field in enumerate(fields(StepRecord)) if field.type not in PLACES]
WORD_NAMES = [FIELDS["step"][index] for index in WORDS]
STEP_FORM = "".join(
    [
        f'{{"{KIND}":"step",',
        *(f'"{FIELDS["step"][i]}":{PLACES[str(fields(StepRecord)[i].type)]},' for i in NUMBERS),
        "%s}\n",
    ]
)
numbers_of, words_of = itemgetter(*NUMBERS), itemgetter(*WORDS)

MAX_LINE_BYTES = 1 << 22
"""No record is as long; a damaged file need not have any line ends, and memory is finite."""


class JsonLines:
    """Writes records as JSON lines.

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
    """Return the JSON line of a row."""
    if row.kind == "step":
        return STEP_FORM % (*numbers_of(row.values), text_of(words_of(row.values)))
    values = dict(zip(FIELDS[row.kind], row.values, strict=True))
    return ENCODER.encode({KIND: row.kind, **values}) + "\n"


@lru_cache(maxsize=256)
def text_of(words: tuple[Json, ...]) -> str:
    """Return the part of a step's JSON line that contains the fields that are not numbers."""
    return ENCODER.encode(dict(zip(WORD_NAMES, words, strict=True)))[1:-1]


def read_json_lines(path: Path) -> Iterator[Item]:
    """Yield the records of a file in order, with `Damage` for unreadable lines.

    Raises:
        OSError: the file cannot be opened or read.
    """
    check_regular(path)
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
    """Read to the end of a line and return the number of bytes read."""
    num_bytes = 0
    while rest := file.readline(MAX_LINE_BYTES):
        num_bytes += len(rest)
        if rest.endswith(b"\n"):
            break
    return num_bytes


def item_of(line: bytes, where: str) -> Item:
    """Parse a line to a record, or to `Damage` if it is not valid."""
    try:
        values = parse_json(line, "the line")
    except UnreadableInput as error:
        what = str(error).removeprefix("the line ")
        ended = line.endswith(b"\n")
        return Damage(where=where, what=what if ended else "cut off in the middle")
    if not isinstance(values, dict):
        return Damage(where=where, what="no JSON object")
    try:
        return record_from(values.pop(KIND, None), values)
    except (OverflowError, ValueError) as error:
        return Damage(where=where, what=str(error))
