"""Reads and writes dataclasses as JSON documents and as JSON lines files."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from forerun.atomic_write import atomic_write
from forerun.bounded_read import read_bytes

__all__ = ["append_line", "from_json", "read_lines", "to_json", "write_json", "write_lines"]

logger = logging.getLogger("forerun.align")

KindT = TypeVar("KindT")


def from_json(kind: type[KindT], values: Any) -> KindT:
    """Build a dataclass from JSON values, checked by the types of its fields.

    A field that is missing has its default. A name that is unknown here is accepted only where its
    value is null: it is a setting of another version of forerun that was not used.

    Args:
        kind: a dataclass, whose fields may be dataclasses.
        values: as `json.loads` returns them.

    Raises:
        ValueError: the values are not those of such an instance.
    """
    try:
        found = msgspec.convert(values, kind, dec_hook=as_path, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    if unknown := unknown_names(values, to_json(found)):
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
    return found


def to_json(value: Any) -> Any:
    """Return a value as `json.loads` would; paths become text."""
    return json.loads(json.dumps(msgspec.to_builtins(value, enc_hook=str, str_keys=True)))


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    with atomic_write(path) as scratch:
        scratch.write_text(json.dumps(to_json(value), indent=1) + "\n", encoding="utf-8")


def as_path(kind: type, value: Any) -> Any:
    """Return a path from text; msgspec does not convert this type by itself."""
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise ValueError(f"{value!r:.60} is not of type {kind.__name__}")


def unknown_names(given: Any, known: Any) -> set[str]:
    """Return the names in `given` that have a value and do not occur in `known`, at any depth."""
    if isinstance(given, Mapping) and isinstance(known, Mapping):
        inner = (unknown_names(given[name], known[name]) for name in given.keys() & known.keys())
        extra = {name for name in given.keys() - known.keys() if given[name] is not None}
        return extra.union(*inner)
    if isinstance(given, list) and isinstance(known, list | tuple):
        return set().union(*(unknown_names(*pair) for pair in zip(given, known, strict=False)))
    return set()


def read_lines(path: Path, kind: type[KindT]) -> list[KindT]:
    """Return the objects of a JSON lines file; an empty list if the file does not exist.

    A process that is killed leaves part of a line at the end, which is ignored. Any other damaged
    line is left out with a warning that names it.

    Args:
        path: of the file.
        kind: dataclass of every line.

    Raises:
        UnreadableInput: the file is too large to be such a file, or cannot be read.
    """
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(read_bytes(path).split(b"\n")[:-1], start=1):
        try:
            found.append(msgspec.json.decode(line, type=kind))
        except (msgspec.MsgspecError, ValueError) as error:
            logger.warning("%s line %d is damaged and is left out: %s", path, number, error)
    return found


def write_lines(path: Path, rows: Iterable[Any]) -> None:
    """Write a file of dataclasses as JSON lines, whole or not at all."""
    with atomic_write(path) as scratch:
        scratch.write_text("".join(map(line_of, rows)), encoding="utf-8")


def append_line(path: Path, row: Any) -> None:
    """Append a dataclass as one line to a JSON lines file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line_of(row))


def line_of(row: Any) -> str:
    """Return a dataclass as one line of JSON."""
    return json.dumps(asdict(row)) + "\n"
