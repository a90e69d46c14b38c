"""Records of a trace as rows of plain values and as JSON lines, checked when they are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from io import BufferedReader, RawIOBase
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import NamedTuple

from forerun.bounded_documents import parse_json
from forerun.bounded_read import check_regular
from forerun.errors import UnreadableInput
from forerun.theory.record import SCHEMA_VERSION, Json, RequestRecord, StepRecord, TraceHeader

__all__ = [
    "COUNTS",
    "DURATIONS",
    "FIELDS",
    "KINDS",
    "MAX_COUNT",
    "MAX_NODES",
    "MAX_SECONDS",
    "NODE_COUNTS",
    "Damage",
    "FlushRule",
    "Item",
    "JsonLines",
    "Record",
    "Row",
    "kind_of",
    "read_json_lines",
    "record_from",
    "row_of",
]


Record = TraceHeader | RequestRecord | StepRecord

KINDS: Mapping[str, type[TraceHeader] | type[RequestRecord] | type[StepRecord]] = {
    "header": TraceHeader,
    "request": RequestRecord,
    "step": StepRecord,
}
"""What a record is called in a file."""

FIELDS: Mapping[str, tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(made)) for kind, made in KINDS.items()
}
"""Names of a kind's fields, in the order of a row."""

GETTERS = {kind: attrgetter(*names) for kind, names in FIELDS.items()}


class Row(NamedTuple):
    """Values of one record in the order of `FIELDS`, in the types that files store."""

    kind: str
    values: list[Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A part of a trace that could not be read.

    Attributes:
        where: line and byte, or part file.
    """

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


Item = Record | Damage
"""What reading a trace yields."""


def kind_of(record: Record) -> str:
    """Return the name of a record's kind."""
    if isinstance(record, StepRecord):
        return "step"
    return "request" if isinstance(record, RequestRecord) else "header"


def row_of(record: Record, changes: Mapping[str, Json] | None = None) -> Row:
    """Convert a record to a row, with some values replaced by field name (`changes`)."""
    kind = kind_of(record)
    values = list(GETTERS[kind](record))
    if changes is not None:
        for name, value in changes.items():
            values[FIELDS[kind].index(name)] = value
    return Row(kind, values)


def record_from(kind: object, values: Mapping[str, object]) -> Record:
    """Build a record of the given kind from its values.

    Raises:
        ValueError: the kind is unknown, a field is missing, unknown or of another type, or counts
            contradict each other; the message says which.
    """
    made = KINDS.get(kind) if isinstance(kind, str) else None
    if made is None:
        raise ValueError(f"a record of kind {kind!r:.60}")
    if made is TraceHeader and values.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"schema version {values.get('schema_version')!r}; this forerun reads {SCHEMA_VERSION}"
        )
    expected = {field.name: field for field in fields(made)}
    if unknown := values.keys() - expected.keys():
        raise ValueError(f"unknown fields {', '.join(sorted(unknown))[:200]}")
    checked: dict[str, object] = {}
    for name, field in expected.items():
        if name in values:
            checked[name] = value_of(str(field.type), name, values[name])
        elif field.default is MISSING:
            raise ValueError(f"no {name}")
    record: Record = made(**checked)  # type: ignore[arg-type]  # checked one by one above
    if isinstance(record, StepRecord):
        check_counts(record)
    elif isinstance(record, RequestRecord):
        check_request(record)
    return record


def value_of(annotation: str, name: str, value: object) -> object:
    """Check and convert a value according to the type annotation of its field."""
    wanted = annotation.removesuffix(" | None")
    if value is None and wanted != annotation:
        return None
    converted = CONVERSIONS[wanted](value)
    if converted is None:
        raise ValueError(f"{name} is {value!r:.60}, not {annotation}")
    return converted


def check_request(record: RequestRecord) -> None:
    """Refuse impossible lengths and times in a request record."""
    for name in ("num_prompt_tokens", "num_output_tokens", "ttft_s", "prefill_s"):
        value = getattr(record, name)
        if value is not None and not 0 <= value <= MAX_SECONDS:
            raise ValueError(f"{name} is {value}; it must be from 0 to {MAX_SECONDS:g}")


MAX_NODES = 4096
"""Draft tokens of one step; the widest drafters propose some hundred."""
MAX_COUNT = 1 << 53
"""Larger integers have no exact float."""
MAX_SECONDS = 1e12
"""Of durations and clocks: 30,000 years."""
NODE_COUNTS = ("k_budget", "num_drafted", "depth_drafted", "num_accepted", "num_emitted")
COUNTS = ("cycle_id", "step", "batch_rows", "num_prefill_rows", "context_tokens")
DURATIONS = ("draft_s", "verify_s", "other_s")


def check_counts(record: StepRecord) -> None:
    """Refuse impossible counts and times in a step record."""
    if not 0 <= record.num_accepted <= record.depth_drafted <= record.num_drafted:
        raise ValueError(
            f"{record.num_accepted} accepted of {record.num_drafted} nodes, "
            f"{record.depth_drafted} deep"
        )
    for names, most in ((NODE_COUNTS, MAX_NODES), (COUNTS, MAX_COUNT), (DURATIONS, MAX_SECONDS)):
        for name in names:
            value = getattr(record, name)
            if not 0 <= value <= most:
                raise ValueError(f"{name} is {value}; it must be from 0 to {most:g}")
    if not abs(record.t_s) <= MAX_SECONDS:
        raise ValueError(f"t_s is {record.t_s}")
    if not 0.0 <= record.expected_accepted <= MAX_NODES:
        raise ValueError(f"expected_accepted is {record.expected_accepted}")
    if not 0 <= record.num_emitted <= record.num_accepted + 1:
        raise ValueError(f"{record.num_emitted} emitted of {record.num_accepted} accepted")


# File formats have fewer types than records, so values are converted as they are read.


def as_integer(value: object) -> int | None:
    """Return an integer; None for any other value."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_number(value: object) -> float | None:
    """Return a number as a float; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def as_text(value: object) -> str | None:
    """Return a string; None for any other value."""
    return value if isinstance(value, str) else None


def as_flag(value: object) -> bool | None:
    """Return a bool; None for any other value."""
    return value if isinstance(value, bool) else None


def as_object(value: object) -> dict[str, object] | None:
    """Return a mapping with string keys as a dict; None for any other value."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return None
    return dict(value)


def as_texts(value: object) -> dict[str, object] | None:
    """Return a mapping of strings to strings as a dict; None for any other value."""
    found = as_object(value)
    all_texts = found is not None and all(isinstance(entry, str) for entry in found.values())
    return found if all_texts else None


def as_tuple(convert: Callable[[object], object]) -> Callable[[object], tuple[object, ...] | None]:
    """Return a function that converts a list to a tuple, and its entries by `convert`."""

    def converted(value: object) -> tuple[object, ...] | None:
        if not isinstance(value, list | tuple):
            return None
        found = tuple(map(convert, value))
        return None if None in found else found

    return converted


CONVERSIONS: Mapping[str, Callable[[object], object]] = {
    "int": as_integer,
    "float": as_number,
    "str": as_text,
    "bool": as_flag,
    "dict[str, str]": as_texts,
    "dict[str, Json]": as_object,
    "tuple[int, ...]": as_tuple(as_integer),
    "tuple[float, ...]": as_tuple(as_number),
    "tuple[str, ...]": as_tuple(as_text),
}
"""By annotation, for every annotation a record has."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushRule:
    """Limits on buffered records; the buffer is written when one of them is reached.

    Attributes:
        num_records: so many wait; no more are ever kept in memory.
        seconds: so much time lies between the steps that wait.
    """

    num_records: int
    seconds: float


class JsonLines:
    """Writes records as JSON lines.

    What is written is handed to the system at once, so it outlives the process.
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
