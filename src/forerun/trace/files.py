"""Writes traces as JSON lines through a buffer, and reads and checks their records."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from pathlib import Path

import msgspec
from msgspec.structs import replace

from forerun.bounded_read import check_regular, first_line
from forerun.errors import InvalidRequest, InvalidTrace, UnreadableInput
from forerun.theory.record import SCHEMA_VERSION, Json, RequestRecord, StepRecord, TraceHeader

Record = TraceHeader | RequestRecord | StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A part of a trace that could not be read."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


Item = Record | Damage
"""Items that reading a trace yields."""


def checked(record: Record) -> Record:
    """Refuse another version of the schema, and counts that contradict each other (ValueError)."""
    if isinstance(record, StepRecord):
        _check_counts(record)
    elif isinstance(record, TraceHeader) and record.schema_version != SCHEMA_VERSION:
        raise ValueError(
            f"schema version {record.schema_version}; this forerun reads {SCHEMA_VERSION}"
        )
    return record


def _check_counts(record: StepRecord) -> None:
    if not record.num_accepted <= record.depth_drafted <= record.num_drafted:
        raise ValueError(
            f"{record.num_accepted} accepted of {record.num_drafted} nodes, "
            f"{record.depth_drafted} deep"
        )
    if record.num_emitted > record.num_accepted + 1:
        raise ValueError(f"{record.num_emitted} emitted of {record.num_accepted} accepted")
    for probs in (record.target_probs, record.draft_probs):
        if probs is not None and len(probs) != record.num_drafted:
            raise ValueError(f"{len(probs)} probabilities of {record.num_drafted} drafted tokens")


ENCODER = msgspec.json.Encoder()
DECODER = msgspec.json.Decoder(Record)

MAX_LINE_BYTES = 1 << 22
"""Most bytes of a line, more than any record has; a damaged file may have no line ends."""
MAX_SKIPPED_BYTES = 1 << 28
"""Most bytes skipped of a line that is too long; after these the rest of the file is not read."""
MAX_DAMAGED = 500_000
"""Most damaged parts of a file; what follows the last of them is not read."""


def read_json_lines(path: Path) -> Iterator[Item]:
    """Yield the records of a file in order, with `Damage` for unreadable lines."""
    check_regular(path)
    with path.open("rb") as file:
        number = offset = 0
        while line := file.readline(MAX_LINE_BYTES):
            number += 1
            where = f"line {number} (byte {offset})"
            offset += len(line)
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                num_skipped, is_over = _skip_line(file)
                offset += num_skipped
                yield Damage(where=where, what=f"longer than {MAX_LINE_BYTES} bytes")
                if not is_over:
                    what = f"no line ends within {MAX_SKIPPED_BYTES} bytes"
                    yield Damage(where=where, what=f"{what}; the rest of the file was not read")
                    return
            elif line.strip():
                yield parse_item(line, where)


def _skip_line(file: BufferedReader) -> tuple[int, bool]:
    """Return how many bytes of a line were read, and whether its end was among them."""
    num_bytes = 0
    while num_bytes < MAX_SKIPPED_BYTES and (rest := file.readline(MAX_LINE_BYTES)):
        num_bytes += len(rest)
        if rest.endswith(b"\n"):
            return num_bytes, True
    return num_bytes, num_bytes < MAX_SKIPPED_BYTES


def version_of(line: bytes) -> object:
    """Return the schema version that a line states; that of this forerun if it states none."""
    try:
        values = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return SCHEMA_VERSION
    return (
        values.get("schema_version", SCHEMA_VERSION) if isinstance(values, dict) else SCHEMA_VERSION
    )


def parse_item(line: bytes, where: str) -> Item:
    """Return the record in a line of a trace, or what is wrong with the line."""
    try:
        return checked(DECODER.decode(line))
    except RecursionError:
        return Damage(where=where, what="nests lists and objects too deep")
    except ValueError as error:
        if (version := version_of(line)) != SCHEMA_VERSION:
            what = f"schema version {version!s:.60}; this forerun reads {SCHEMA_VERSION}"
            return Damage(where=where, what=what)
        cut_off = not line.endswith(b"\n") and not isinstance(error, msgspec.ValidationError)
        what = "cut off in the middle" if cut_off else f"{first_line(error):.300}"
        return Damage(where=where, what=what)


logger = logging.getLogger(__name__)


NUM_BUFFERED = 256
"""Records from which on they are written."""
BUFFERED_S = 1.0
"""Seconds after which they are written even if they are fewer."""


class TraceWriter:
    """Buffers records, such as those of engine steps, and writes them to a file as JSON lines.

    Nothing that happens to the file reaches the caller. Where a write fails, a warning says so
    once, what was written before stays, and further records are dropped: a full disk ends the
    trace, not the generation. It reads no clock: the records bring their own.

    Attributes:
        num_written: records that reached the file.
        failed: whether a write failed; a command that was asked for a trace reports this.
    """

    def __init__(self, file: RawIOBase, name: str) -> None:
        self.file = file
        self.name = name
        self.num_written = 0
        self.failed = False
        self._waiting: list[tuple[Record, Mapping[str, Json] | None]] = []
        self._due_s = math.inf

    def add(self, record: Record, changes: Mapping[str, Json] | None = None) -> None:
        """Buffer a record, and write the buffer if a limit is reached.

        `changes` has values by field name that take the place of the record's: what the caller
        knows and the engine does not.
        """
        if self.failed:
            return
        self._waiting.append((record, changes))
        if len(self._waiting) >= NUM_BUFFERED:
            self.flush()
        elif type(record) is StepRecord:
            if record.t_s >= self._due_s:
                self.flush()
            elif self._due_s == math.inf:
                self._due_s = record.t_s + BUFFERED_S

    def flush(self) -> None:
        waiting, self._waiting, self._due_s = self._waiting, [], math.inf
        if self.failed or not waiting:
            return
        records = (replace(record, **changes) if changes else record for record, changes in waiting)
        try:
            remaining = memoryview(ENCODER.encode_lines(records))
            while remaining:  # a file that is nearly full takes a part, and refuses the next
                remaining = remaining[self.file.write(remaining) or 0 :]
        except (OSError, UnicodeEncodeError) as error:  # text that is not UTF-8
            self._fail(error)
        else:
            self.num_written += len(waiting)

    def close(self) -> None:
        self.flush()
        try:
            self.file.close()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError | UnicodeEncodeError) -> None:
        if not self.failed:
            logger.error(
                "the trace %s cannot be written (%s); it ends after %d records, the rest goes on",
                self.name,
                getattr(error, "strerror", None) or error,
                self.num_written,
            )
        self.failed = True


@contextmanager
def open_trace(path: Path) -> Iterator[TraceWriter]:
    """Open a trace for writing, and replace an existing one; raises InvalidRequest."""
    check_suffix(path)
    try:
        file = path.open("wb", buffering=0)
    except OSError as error:
        raise InvalidRequest(
            f"the trace {path} cannot be written: {error.strerror or error}"
        ) from error
    writer = TraceWriter(file, str(path))
    try:
        yield writer
    finally:
        writer.close()


def check_suffix(path: Path) -> None:
    """Refuse a path that is not named as a trace (InvalidRequest)."""
    if path.suffix != ".jsonl":
        raise InvalidRequest(f"the trace {path} must end in .jsonl")


def read_trace(path: Path) -> Iterator[Item]:
    """Yield the records of a trace, and a `Damage` for every part that cannot be read.

    A trace is read lazily. Whatever is whole is returned: a line or part that is not gives a
    `Damage` that says where and what, and reading goes on after it.

    Raises:
        InvalidTrace: it cannot be read, or nothing in it is a record.
    """
    num_records = num_damaged = 0
    first_damage: Damage | None = None
    try:
        for item in read_json_lines(path):
            yield item
            if not isinstance(item, Damage):
                num_records += 1
                continue
            first_damage, num_damaged = first_damage or item, num_damaged + 1
            if num_damaged >= MAX_DAMAGED:
                what = f"{MAX_DAMAGED} parts cannot be read; the rest of the file was not read"
                yield Damage(where=item.where, what=what)
                break
    except OSError as error:
        raise InvalidTrace(f"the trace {path} cannot be read: {error.strerror or error}") from error
    except UnreadableInput as error:
        raise InvalidTrace(f"the trace {error}") from error
    if not num_records:
        raise InvalidTrace(
            f"{path} holds no record of a trace: {first_damage or 'it is empty'}; logs and pages "
            "of metrics are read by forerun diagnose"
        )
