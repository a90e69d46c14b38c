"""Converts records to rows of plain values and back, with validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from operator import attrgetter
from typing import NamedTuple

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
    "Item",
    "Record",
    "Row",
    "kind_of",
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
        what: what is wrong with it.
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
