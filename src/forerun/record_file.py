"""Records as JSON lines, appended one at a time, from which an interrupted run goes on."""

from __future__ import annotations

import os
from pathlib import Path
from types import UnionType
from typing import IO, Generic, TypeVar

import msgspec

from forerun.atomic_write import errors_naming
from forerun.bounded_read import ReadLimits, check_regular, first_line, open_bounded
from forerun.errors import InvalidRequest, UnreadableInput

RecordT = TypeVar("RecordT")

_LIMITS = ReadLimits(max_bytes=1 << 28)
_MAX_VALUES = 4_000_000
"""Most values of a file; an audit of 20,000 tokens writes a fifth of them."""


class RecordFile(Generic[RecordT]):
    """A file of records of one kind.

    An interruption may tear the last line. It is left out, and cut off before the next record is
    appended; until then the file stays as it is, because it may be another program's.
    """

    def __init__(self, path: Path, kind: type[RecordT] | UnionType) -> None:
        self.path, self.kind = path, kind
        self._num_bytes: int | None = None

    def is_empty(self) -> bool:
        """Return whether there is no file, or nothing in it."""
        return not self.path.exists() or (self.path.is_file() and not self.path.stat().st_size)

    def read(self) -> list[RecordT]:
        """Return the records of all whole lines; none if there is no file.

        Raises:
            UnreadableInput: a line is no such record, or the file exceeds a limit; the message has
                the line's number.
            OSError: the file cannot be read.
        """
        if self.is_empty():
            return []
        check_regular(self.path)  # a pipe would be waited for
        found, num_values, num_bytes = list[RecordT](), 0, 0
        with open_bounded(self.path, _LIMITS) as file:
            for number, line in enumerate(file.lines(), start=1):
                if not line.endswith(b"\n"):
                    break
                num_bytes += len(line)
                num_values += line.count(b",")
                if num_values > _MAX_VALUES:
                    raise UnreadableInput(f"it holds more than {_MAX_VALUES} values, the limit")
                try:
                    found += [msgspec.json.decode(line, type=self.kind)] if line.strip() else []
                except (msgspec.DecodeError, RecursionError, ValueError) as error:
                    raise UnreadableInput(
                        f"{self.path}:{number} is no record of such a run: {first_line(error)}"
                    ) from error
        self._num_bytes = num_bytes
        return found

    def append(self, record: RecordT) -> None:
        """Append a record, and wait until it is on the disk; an OSError names the file."""
        if self._num_bytes is not None:
            os.truncate(self.path, self._num_bytes)
            self._num_bytes = None
        with errors_naming(self.path), self.path.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")
            file.flush()
            os.fsync(file.fileno())


def lock_run_folder(folder: Path, program: str) -> IO[bytes]:
    """Return an open file that keeps other runs out until it is closed, or its process ends.

    Raises InvalidRequest if another run of `forerun PROGRAM` has the folder.
    """
    import fcntl  # not on Windows, where no server can be paused either

    file = (folder / ".lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise InvalidRequest(
            f"another run of forerun {program} uses {folder}; wait until it has ended, or name "
            "another folder"
        ) from error
    return file
