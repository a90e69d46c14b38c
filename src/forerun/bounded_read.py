"""Reading of files and standard input within limits on bytes and time.

Whatever is read was written by others: it may be huge, never end, nest deeply or unpack to more
than memory holds. Every function here stops at its `ReadLimits` with an `UnreadableInput` that
names the source, the limit and what to do.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import UnreadableInput


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """Limits on bytes, time and records of one source; the defaults are for settings files.

    Attributes:
        max_bytes: of the source, and of what it decompresses to.
        max_seconds: from opening it to its end, waiting for a slow writer or server included.
        max_depth: lists and objects inside one another.
        max_values: numbers, texts, lists and objects of a document.
        max_digits: of a number. Python converts more digits in quadratic time, and no float holds
            a value of more than 309 of them.
        max_line_bytes: of one line, where lines are read one by one.
        max_rows: lines of a file, or rows of a table.
    """

    max_bytes: int = 1 << 26
    max_seconds: float = 30.0
    max_depth: int = 64
    max_values: int = 2_000_000
    max_digits: int = 64
    max_line_bytes: int = 1 << 22
    max_rows: int = 50_000_000


DEFAULT = ReadLimits()
CHUNK_BYTES = 1 << 20


class Deadline:
    """A time limit that several operations share."""

    def __init__(self, max_seconds: float, name: str) -> None:
        self.max_seconds = max_seconds
        self.name = name
        self._end_s = time.monotonic() + max_seconds

    def remaining_s(self) -> float:
        """Return the seconds left until the deadline; raises UnreadableInput if none are."""
        left = self._end_s - time.monotonic()
        if left <= 0.0:
            raise UnreadableInput(
                f"{self.name} takes more than {self.max_seconds:g} s to read; copy it to a regular "
                "file, or give less of it"
            )
        return left


class BoundedFile:
    """A file or stream that is read within limits; a context manager.

    Pipes are waited for until the deadline, since their writer may never write.
    """

    def __init__(
        self, handle: int, name: str, limits: ReadLimits = DEFAULT, *, owned: bool = True
    ) -> None:
        self.name = name
        self.limits = limits
        self.deadline = Deadline(limits.max_seconds, name)
        self.num_bytes = 0
        self._handle = handle
        self._owned = owned
        self._pending = b""
        self._waits = not stat.S_ISREG(os.fstat(handle).st_mode)

    def __enter__(self) -> BoundedFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._owned:
            os.close(self._handle)

    def wait_for_data(self, max_seconds: float) -> None:
        """Wait until a pipe has data to read, or has ended; raises UnreadableInput."""
        max_seconds = min(max_seconds, self.deadline.remaining_s())
        if self._waits and not select.select([self._handle], [], [], max_seconds)[0]:
            raise UnreadableInput(
                f"nothing was written to {self.name} within {max_seconds:.2g} s; start its writer "
                "first, or copy it to a regular file"
            )

    def peek(self, size: int) -> bytes:
        """Return the next bytes, at most `size`, without consuming them."""
        while len(self._pending) < size:
            chunk = self._read_chunk(size - len(self._pending))
            if not chunk:
                break
            self._pending += chunk
        return self._pending[:size]

    def read(self, size: int = CHUNK_BYTES, /) -> bytes:
        """Read between 1 and `size` bytes, none at the end; raises UnreadableInput."""
        if self._pending:
            taken, self._pending = self._pending[:size], self._pending[size:]
            return taken
        return self._read_chunk(size)

    def read_all(self) -> bytes:
        """Read everything up to the end."""
        pieces = []
        while piece := self.read(CHUNK_BYTES):
            pieces.append(piece)
        return b"".join(pieces)

    def lines(self) -> Iterator[bytes]:
        """Yield lines with their line ends; the last line may lack one.

        Raises:
            UnreadableInput: as for `read`, or a line or the number of lines is over its limit.
        """
        rest, num_lines, limits = b"", 0, self.limits
        while chunk := self.read(CHUNK_BYTES):
            *whole, rest = (rest + chunk).split(b"\n")
            num_lines += len(whole)
            if num_lines > limits.max_rows:
                raise UnreadableInput(f"{self.name} has more than {limits.max_rows} lines")
            if len(rest) > limits.max_line_bytes or any(
                len(line) > limits.max_line_bytes for line in whole
            ):
                raise UnreadableInput(
                    f"{self.name} has a line of more than {limits.max_line_bytes} bytes"
                )
            yield from (line + b"\n" for line in whole)
        if rest:
            yield rest

    def _read_chunk(self, size: int) -> bytes:
        left_s = self.deadline.remaining_s()
        limit = self.limits.max_bytes
        try:
            if self._waits and not select.select([self._handle], [], [], left_s)[0]:
                self.deadline.remaining_s()
            chunk = os.read(self._handle, min(size, limit + 1 - self.num_bytes))
        except BlockingIOError:  # another reader of the pipe was faster
            return self._read_chunk(size)
        except OSError as error:
            raise unreadable(self.name, error) from error
        self.num_bytes += len(chunk)
        if self.num_bytes > limit:
            raise UnreadableInput(
                f"{self.name} is larger than {limit} bytes, the limit here; give less of it"
            )
        return chunk


def open_bounded(
    path: Path, limits: ReadLimits = DEFAULT, *, name: str | None = None
) -> BoundedFile:
    """Open a regular file or a pipe, and refuse any other kind of file.

    Raises:
        UnreadableInput: it does not exist, may not be read, or is a folder, a device or a socket.
    """
    name = str(path) if name is None else name
    try:
        # Without O_NONBLOCK, opening a FIFO that has no writer never returns.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        mode = os.fstat(handle).st_mode
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise unreadable(name, error) from error
    if stat.S_ISREG(mode) or stat.S_ISFIFO(mode):
        return BoundedFile(handle, name, limits)
    os.close(handle)
    kind = "a folder" if stat.S_ISDIR(mode) else "a device or a socket"
    raise UnreadableInput(f"{name} is {kind}; give a regular file")


def open_stdin(limits: ReadLimits = DEFAULT) -> BoundedFile:
    """Open standard input; closing the result leaves the file descriptor open."""
    try:
        handle = sys.stdin.fileno()
        return BoundedFile(handle, "standard input", limits, owned=False)
    except (AttributeError, OSError, ValueError) as error:
        raise UnreadableInput("standard input is closed; give a file") from error


def read_bytes(path: Path, limits: ReadLimits = DEFAULT) -> bytes:
    """The content of a file; raises UnreadableInput if it cannot be read within the limits."""
    with open_bounded(path, limits) as file:
        return file.read_all()


def read_text(path: Path, limits: ReadLimits = DEFAULT) -> str:
    """The content of a UTF-8 file, without a byte order mark; raises UnreadableInput."""
    return decoded(read_bytes(path, limits), str(path))


def gunzipped(data: bytes, name: str, limits: ReadLimits = DEFAULT) -> bytes:
    """Decompress gzip or zlib data, of at most `max_bytes`; raises UnreadableInput."""
    unpacker = zlib.decompressobj(wbits=47)  # 32 + 15: either header
    try:
        found = unpacker.decompress(data, limits.max_bytes + 1)
    except zlib.error as error:
        raise UnreadableInput(f"{name} is not gzip: {error}") from error
    if len(found) > limits.max_bytes:
        raise UnreadableInput(
            f"{name} decompresses to more than {limits.max_bytes} bytes, the limit here"
        )
    if not unpacker.eof:
        raise UnreadableInput(f"{name} is compressed data that was cut off")
    return found


def check_regular(path: Path) -> None:
    """Refuse a path that is not a regular file (UnreadableInput)."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise unreadable(str(path), error) from error
    if not stat.S_ISREG(mode):
        raise UnreadableInput(f"{path} is not a regular file; copy what it holds to one")


def decoded(data: bytes, name: str) -> str:
    """UTF-8 text without a byte order mark."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableInput(f"{name} is not UTF-8 at byte {error.start}") from error


def unreadable(name: str, error: Exception) -> UnreadableInput:
    """Return the error for a source that the operating system cannot read."""
    number = getattr(error, "errno", None)
    reason = "the name is too long" if number == errno.ENAMETOOLONG else None
    reason = reason or getattr(error, "strerror", None) or str(error)
    shown = name if len(name) <= 300 else name[:300] + "…"
    return UnreadableInput(f"{shown} cannot be read: {reason}")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
