"""Reading of Parquet files in batches of rows with limited unpacked size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.bounded_read import Deadline, ReadLimits, check_regular, first_line
from forerun.errors import UnreadableInput

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["parquet_batches"]

DEFAULT = ReadLimits()
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
        path: of one file.
        columns: names of those to read; None for all.
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
        texts = check_parquet(metadata, name, limits)
        with pq.ParquetFile(
            path, metadata=metadata, read_dictionary=texts, page_checksum_verification=True
        ) as file:
            if missing := set(columns or ()) - set(file.schema_arrow.names):
                raise UnreadableInput(f"{name} has no column {min(missing)!r}")
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                deadline.remaining_s()
                size = batch.nbytes + sum(map(unpacked_bytes, batch.columns))
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


def check_parquet(metadata: Any, name: str, limits: ReadLimits) -> list[str]:
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


def unpacked_bytes(array: pa.Array) -> int:
    """Return the size of an array of texts in bytes, if each row has its own copy."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(array.type):
        lengths = pc.cast(pc.binary_length(array.dictionary), pa.int64())
        return pc.sum(lengths.take(array.indices)).as_py() or 0
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return unpacked_bytes(array.flatten())
    if pa.types.is_struct(array.type):
        return sum(map(unpacked_bytes, array.flatten()))
    return 0
