"""Reading of files and standard input within limits on bytes and time.

Whatever is read was written by others: it may be huge, never end, nest deeply or unpack to more
than memory holds. Every function here stops at its `ReadLimits` with an `UnreadableInput` that
names the source, the limit and what to do.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import select
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import UnreadableInput

if TYPE_CHECKING:
    import pyarrow as pa


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
FIRST_DATA_S = 20.0
"""Seconds that a named pipe may be empty before its first data."""


class Deadline:
    """A time limit that several operations share; `remedy` ends the sentence of its error."""

    def __init__(
        self,
        max_seconds: float,
        name: str,
        remedy: str = "to read; copy it to a regular file, or give less of it",
    ) -> None:
        self.max_seconds = max_seconds
        self.name = name
        self.remedy = remedy
        self._end_s = time.monotonic() + max_seconds

    def remaining_s(self) -> float:
        """Return the seconds left until the deadline; raises UnreadableInput if none are."""
        left = self._end_s - time.monotonic()
        if left <= 0.0:
            raise UnreadableInput(
                f"{self.name} takes more than {self.max_seconds:g} s {self.remedy}"
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
        wait_s, limit = self.deadline.remaining_s(), self.limits.max_bytes
        is_first = self._owned and not self.num_bytes
        if is_first:
            wait_s = min(FIRST_DATA_S, wait_s)
        try:
            if self._waits and not select.select([self._handle], [], [], wait_s)[0]:
                if is_first:
                    limit_s = min(FIRST_DATA_S, self.limits.max_seconds)
                    raise UnreadableInput(
                        f"nothing was written to {self.name} within {limit_s:g} s; start its "
                        "writer first, or copy it to a regular file"
                    )
                return self._read_chunk(size)
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


def check_regular(path: Path) -> None:
    """Refuse a path that is not a regular file (UnreadableInput)."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise unreadable(str(path), error) from error
    if stat.S_ISDIR(mode):
        raise UnreadableInput(f"{path} is a folder; name a file in it")
    if not stat.S_ISREG(mode):
        raise UnreadableInput(f"{path} is not a regular file; copy what it holds to one")


def decoded(data: bytes, name: str) -> str:
    """Decode UTF-8, without its byte order mark; raises UnreadableInput that names the source."""
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


def read_json(path: Path, limits: ReadLimits = DEFAULT) -> Any:
    """Parse the JSON document in a file; raises UnreadableInput."""
    return parse_json(read_bytes(path, limits), str(path), limits)


def json_lines(path: Path, limits: ReadLimits = DEFAULT) -> Iterator[tuple[int, Any]]:
    """Yield line number (from 1) and JSON value of every line that is not blank.

    Raises:
        UnreadableInput: the file cannot be read within the limits, or a line is not JSON; the
            message has its number.
    """
    with open_bounded(path, limits) as file:
        for number, line in enumerate(file.lines(), start=1):
            if line.strip():
                yield number, parse_json(line, f"{path} line {number}", limits)


def parse_json(data: bytes | str, name: str, limits: ReadLimits = DEFAULT) -> Any:
    """Parse JSON within limits on depth, number of values and digits; raises UnreadableInput.

    The size of `data` was limited when it was read; `name` is that of the source, for messages.
    """
    text = decoded(data, name) if isinstance(data, bytes) else data
    # Commas and brackets bound the number of values before memory is spent on them.
    if text.count(",") + text.count("[") + text.count("{") + 1 > limits.max_values:
        raise UnreadableInput(
            f"{name} may hold more than {limits.max_values} values, the limit here"
        )
    hooks: dict[str, Any] = {}
    if re.search(rf"[0-9]{{{limits.max_digits + 1}}}|[eE]\+?[0-9]{{3}}", text):
        hooks = {
            "parse_int": lambda digits: int(check_number(digits, name, limits)),
            "parse_float": lambda digits: float(check_number(digits, name, limits)),
        }
    try:
        value = json.loads(text, **hooks)
    except UnreadableInput:
        raise
    except RecursionError as error:
        raise _describe_depth(name, limits) from error
    except ValueError as error:
        raise UnreadableInput(f"{name} is not JSON: {error}") from error
    if text.count("[") + text.count("{") > limits.max_depth:
        _check_depth(value, name, limits)
    return value


def check_number(digits: str, name: str, limits: ReadLimits) -> str:
    """Return the digits of a JSON number, or refuse them if there are too many."""
    if len(digits) > limits.max_digits:
        raise UnreadableInput(
            f"{name} has a number of {len(digits)} digits; at most {limits.max_digits} are read"
        )
    if math.isinf(float(digits)):
        raise UnreadableInput(f"{name} has the number {digits}, which is too large")
    return digits


def _check_depth(value: object, name: str, limits: ReadLimits) -> None:
    """Refuse a document with too many levels."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limits.max_depth):
        if not level:
            return
        level = [
            inner
            for entry in level
            for inner in (entry.values() if isinstance(entry, dict) else entry)
            if isinstance(inner, dict | list)
        ]
    if level:
        raise _describe_depth(name, limits)


def _describe_depth(name: str, limits: ReadLimits) -> UnreadableInput:
    return UnreadableInput(
        f"{name} nests lists and objects more than {limits.max_depth} deep, the limit here"
    )


BATCH_ROWS = 4096
MAX_BATCH_VALUES = 50_000_000
"""Values of one column in one row group: one row may hold them all, and a batch has whole rows."""


def read_parquet(
    path: Path, columns: Sequence[str] | None = None, limits: ReadLimits = DEFAULT
) -> Iterator[pa.RecordBatch]:
    """Yield batches of rows of a Parquet file, within a limit on their unpacked size.

    Repeated values take almost no space in Parquet, so a small file may hold billions of rows, or
    one long text in every row. What the file declares is checked before anything is unpacked, and
    texts are unpacked after their lengths were added up.

    Args:
        limits: bytes (unpacked, of a column of a row group and of a batch), rows, values and
            seconds are enforced here.

    Raises:
        UnreadableInput: it is not Parquet, is damaged, lacks a column, or is over a limit.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    name = str(path)
    check_regular(path)
    deadline = Deadline(limits.max_seconds, name)
    try:
        metadata = pq.read_metadata(path)
        texts = _check_parquet(metadata, name, limits)
        with pq.ParquetFile(
            path, metadata=metadata, read_dictionary=texts, page_checksum_verification=True
        ) as file:
            if missing := set(columns or ()) - set(file.schema_arrow.names):
                raise UnreadableInput(f"{name} has no column {min(missing)!r}")
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                deadline.remaining_s()
                batch.validate(full=True)  # texts may be no UTF-8
                size = batch.nbytes + sum(map(_count_unpacked, batch.columns))
                if size > limits.max_bytes:
                    raise UnreadableInput(
                        f"{name}: {batch.num_rows} rows unpack to {size} bytes; at most "
                        f"{limits.max_bytes} are read at once"
                    )
                yield pa.RecordBatch.from_arrays(
                    [
                        array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
                        for array in batch.columns
                    ],
                    names=batch.schema.names,
                )
    except (OSError, KeyError, pa.ArrowException) as error:
        raise UnreadableInput(f"{name} cannot be read as Parquet: {first_line(error)}") from error


def _check_parquet(metadata: Any, name: str, limits: ReadLimits) -> list[str]:
    """Refuse a file that declares more data than the limits allow; return its text columns."""
    if metadata.num_rows > limits.max_rows:
        raise UnreadableInput(
            f"{name} has {metadata.num_rows} rows; the limit is {limits.max_rows}"
        )
    texts = set()
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        most = min(MAX_BATCH_VALUES, limits.max_values + 16 * group.num_rows)
        most = max(most, group.num_rows)
        for place in range(group.num_columns):
            column = group.column(place)
            if column.physical_type == "BYTE_ARRAY":
                texts.add(column.path_in_schema)
            size = column.total_uncompressed_size
            if column.num_values > most or size > 8 * limits.max_bytes:
                raise UnreadableInput(
                    f"{name}: column {column.path_in_schema!r} has {column.num_values} values in "
                    f"{size} bytes in one row group; at most {most} values and "
                    f"{8 * limits.max_bytes} bytes are read: write smaller row groups"
                )
    return sorted(texts)


def _count_unpacked(array: pa.Array) -> int:
    """Return the size of an array of texts in bytes, if each row has its own copy."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(array.type):
        lengths = pc.cast(pc.binary_length(array.dictionary), pa.int64())
        return pc.sum(lengths.take(array.indices)).as_py() or 0
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return _count_unpacked(array.flatten())
    if pa.types.is_struct(array.type):
        return sum(map(_count_unpacked, array.flatten()))
    return 0
