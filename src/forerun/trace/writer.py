"""Buffers trace records and writes them to a file."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from forerun.theory.record import Json, StepRecord
from forerun.trace.schema import Record, Row, row_of

__all__ = ["FlushRule", "Sink", "TraceWriter"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushRule:
    """Limits on buffered records; the buffer is written when one of them is reached.

    Attributes:
        num_records: so many wait; no more are ever kept in memory.
        seconds: so much time lies between the steps that wait.
    """

    num_records: int
    seconds: float


@runtime_checkable
class Sink(Protocol):
    """Interface of a file format for records."""

    @property
    def flush_rule(self) -> FlushRule:
        """Limits at which buffered records are written to this format."""

    def write(self, rows: Iterable[Row]) -> None:
        """Write rows that remain readable if the process is killed afterwards.

        Raises:
            OSError: they could not be written; earlier ones are still there.
        """

    def close(self) -> None:
        """Close open files.

        Raises:
            OSError: as for `write`.
        """


class TraceWriter:
    """Buffers records, such as those of engine steps, and writes them to a trace file.

    Nothing that happens to the file reaches the caller. Where a write fails, a warning says so
    once, what was written before stays, and further records are dropped: a full disk ends the
    trace, not the generation. It reads no clock: the records bring their own.

    Args:
        sink: where they go.
        name: of the file, for the warning.

    Attributes:
        num_written: records that reached the file.
        failed: whether a write failed; a command that was asked for a trace reports this.
        error: why it failed; None if it did not.
    """

    def __init__(self, sink: Sink, name: str) -> None:
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
            self.sink.write(row_of(record, changes) for record, changes in waiting)
        except OSError as error:
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

    def _fail(self, error: OSError) -> None:
        if not self.failed:
            self.error = error.strerror or str(error)
            logger.warning(
                "the trace %s cannot be written (%s); it ends after %d records, the rest goes on",
                self.name,
                error.strerror or error,
                self.num_written,
            )
        self.failed = True
