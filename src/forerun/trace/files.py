"""Opens trace files, whose suffix selects the format; pyarrow is imported for Parquet only."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forerun.errors import InvalidRequest, InvalidTrace, UnreadableInput
from forerun.trace.jsonl import JsonLines, read_json_lines
from forerun.trace.schema import Damage, Item
from forerun.trace.writer import Sink, TraceWriter

__all__ = ["SUFFIXES", "check_suffix", "open_trace", "read_trace"]

SUFFIXES = (".jsonl", ".parquet")


@contextmanager
def open_trace(path: Path) -> Iterator[TraceWriter]:
    """Open a trace for writing; an existing trace is replaced.

    Args:
        path: ends in .jsonl, or in .parquet for a folder of Parquet parts.

    Raises:
        InvalidRequest: it ends in something else, or cannot be written.
    """
    check_suffix(path)
    try:
        sink = json_lines(path) if path.suffix == ".jsonl" else parquet_parts(path)
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
    """Refuse a path whose suffix does not belong to a trace format.

    Raises:
        InvalidRequest: it ends in something else.
    """
    if path.suffix not in SUFFIXES:
        raise InvalidRequest(f"the trace {path} must end in {' or '.join(SUFFIXES)}")


def json_lines(path: Path) -> JsonLines:
    """Open a JSON lines trace for writing; an existing file is emptied."""
    return JsonLines(path.open("wb", buffering=0))


def parquet_parts(folder: Path) -> Sink:
    """Open a Parquet trace for writing; an existing trace is removed, other folders are refused."""
    from forerun.trace.parquet import FOLDERS, HEADERS, ParquetParts

    folder.mkdir(exist_ok=True)
    strange = {entry.name for entry in folder.iterdir()} - {HEADERS, *FOLDERS}
    if strange:
        raise InvalidRequest(
            f"the trace {folder} cannot be written: the folder holds {min(strange)}, which is no "
            "part of a trace"
        )
    for name in FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    return ParquetParts(folder, json_lines(folder / HEADERS))


def read_trace(path: Path) -> Iterator[Item]:
    """Yield the records of a trace, and a `Damage` for every part that cannot be read.

    A trace is read lazily. Whatever is whole is returned: a line or part that is not gives a
    `Damage` that says where and what, and reading goes on after it.

    Args:
        path: what `open_trace` wrote; a folder is Parquet, a file JSON lines.

    Raises:
        InvalidTrace: it cannot be read, or nothing in it is a record.
    """
    num_records, first_damage = 0, None
    try:
        for item in read_items(path):
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


def read_items(path: Path) -> Iterator[Item]:
    """Yield records and damage in the format that the path's suffix names."""
    if not path.is_dir():
        yield from read_json_lines(path)
        return
    from forerun.trace.parquet import read_parquet

    yield from read_parquet(path)
