"""Parsing of JSON and Parquet within limits on depth, values, digits and unpacked size."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.bounded_read import (
    Deadline,
    ReadLimits,
    check_regular,
    decoded,
    first_line,
    open_bounded,
    read_bytes,
)
from forerun.errors import UnreadableInput

if TYPE_CHECKING:
    import pyarrow as pa

DEFAULT = ReadLimits()


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

        def integer(digits: str) -> int:
            return int(checked_number(digits, name, limits))

        def real(digits: str) -> float:
            return float(checked_number(digits, name, limits))

        hooks = {"parse_int": integer, "parse_float": real}
    try:
        value = json.loads(text, **hooks)
    except UnreadableInput:
        raise
    except RecursionError as error:
        raise _too_deep(name, limits) from error
    except ValueError as error:
        raise UnreadableInput(f"{name} is not JSON: {error}") from error
    if text.count("[") + text.count("{") > limits.max_depth:
        _check_depth(value, name, limits)
    return value


def checked_number(digits: str, name: str, limits: ReadLimits) -> str:
    """Return the digits of a JSON number, or refuse them if there are too many."""
    if len(digits) > limits.max_digits:
        raise UnreadableInput(
            f"{name} has a number of {len(digits)} digits; at most {limits.max_digits} are read"
        )
    if math.isinf(float(digits)):
        raise UnreadableInput(f"{name} has the number {digits}, which is too large")
    return digits


def _check_depth(value: object, name: str, limits: ReadLimits) -> None:
    """Refuse a document with too many levels, too many values or too large integers."""
    level, num_values = [value], 0
    for depth in range(limits.max_depth + 1):
        num_values += len(level)
        if num_values > limits.max_values:
            raise UnreadableInput(f"{name} holds more than {limits.max_values} values")
        inner: list[object] = []
        for entry in level:
            if isinstance(entry, dict | list) and depth == limits.max_depth:
                raise _too_deep(name, limits)
            if isinstance(entry, dict):
                inner += entry.values()
            elif isinstance(entry, list):
                inner += entry
            elif isinstance(entry, int) and abs(entry) >= 10**limits.max_digits:
                raise UnreadableInput(
                    f"{name} has a number of more than {limits.max_digits} digits"
                )
        level = inner


def _too_deep(name: str, limits: ReadLimits) -> UnreadableInput:
    return UnreadableInput(
        f"{name} nests lists and objects more than {limits.max_depth} deep, the limit here"
    )


BATCH_ROWS = 4096
MAX_BATCH_VALUES = 50_000_000
"""Values of one column in one row group: one row may hold them all, and a batch has whole rows."""


def parquet_batches(
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
                size = batch.nbytes + sum(map(_unpacked_bytes, batch.columns))
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


def _unpacked_bytes(array: pa.Array) -> int:
    """Return the size of an array of texts in bytes, if each row has its own copy."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(array.type):
        lengths = pc.cast(pc.binary_length(array.dictionary), pa.int64())
        return pc.sum(lengths.take(array.indices)).as_py() or 0
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return _unpacked_bytes(array.flatten())
    if pa.types.is_struct(array.type):
        return sum(map(_unpacked_bytes, array.flatten()))
    return 0
