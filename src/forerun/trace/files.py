"""Writes traces through a buffer, and reads them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from forerun.errors import InvalidRequest, InvalidTrace, UnreadableInput
from forerun.theory.record import Json, StepRecord
from forerun.trace.schema import (
    Damage,
    Item,
    JsonLines,
    Record,
    read_json_lines,
)

logger = logging.getLogger(__name__)


class TraceWriter:
    """Buffers records, such as those of engine steps, and writes them to a trace file.

    Nothing that happens to the file reaches the caller. Where a write fails, a warning says so
    once, what was written before stays, and further records are dropped: a full disk ends the
    trace, not the generation. It reads no clock: the records bring their own.

    Attributes:
        num_written: records that reached the file.
        failed: whether a write failed; a command that was asked for a trace reports this.
        error: why it failed; None if it did not.
    """

    def __init__(self, sink: JsonLines, name: str) -> None:
        self.sink = sink
        self._rule = sink.flush_rule
        self.name = name
        self.num_written = 0
        self.failed = False
        self.error: str | None = None
        self._waiting: list[tuple[Record, Mapping[str, Json] | None]] = []
        self._due_s = math.inf

    def add(self, record: Record, changes: Mapping[str, Json] | None = None) -> None:
        """Buffer a record, and write the buffer if a limit is reached.

        Args:
            record: of any kind.
            changes: values by field name that take the place of the record's: what the caller knows
                and the engine does not.
        """
        if self.failed:
            return
        self._waiting.append((record, changes))
        if len(self._waiting) >= self._rule.num_records:
            self.flush()
        elif type(record) is StepRecord:
            if record.t_s >= self._due_s:
                self.flush()
            elif self._due_s == math.inf:
                self._due_s = record.t_s + self._rule.seconds

    def flush(self) -> None:
        """Write the buffered records."""
        waiting, self._waiting, self._due_s = self._waiting, [], math.inf
        if self.failed or not waiting:
            return
        try:
            self.sink.write(
                replace(record, **changes) if changes else record for record, changes in waiting
            )
        except (OSError, UnicodeEncodeError) as error:  # text that is not UTF-8
            self._fail(error)
        else:
            self.num_written += len(waiting)

    def close(self) -> None:
        """Write the buffered records and close the file."""
        self.flush()
        try:
            self.sink.close()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError | UnicodeEncodeError) -> None:
        if not self.failed:
            self.error = getattr(error, "strerror", None) or str(error)
            logger.warning(
                "the trace %s cannot be written (%s); it ends after %d records, the rest goes on",
                self.name,
                self.error,
                self.num_written,
            )
        self.failed = True


@contextmanager
def open_trace(path: Path) -> Iterator[TraceWriter]:
    """Open a trace for writing; an existing trace is replaced.

    Raises:
        InvalidRequest: it ends in something else, or cannot be written.
    """
    check_suffix(path)
    try:
        sink = JsonLines(path.open("wb", buffering=0))
    except OSError as error:
        raise InvalidRequest(
            f"the trace {path} cannot be written: {error.strerror or error}"
        ) from error
    writer = TraceWriter(sink, str(path))
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
    num_records, first_damage = 0, None
    try:
        for item in read_json_lines(path):
            if isinstance(item, Damage):
                first_damage = first_damage or item
            else:
                num_records += 1
            yield item
    except OSError as error:
        raise InvalidTrace(f"the trace {path} cannot be read: {error.strerror or error}") from error
    except UnreadableInput as error:
        raise InvalidTrace(f"the trace {error}") from error
    if not num_records:
        raise InvalidTrace(f"{path} holds no record of a trace: {first_damage or 'it is empty'}")
