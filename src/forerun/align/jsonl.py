"""JSON objects, a line each, in a file that is appended to until somebody kills the process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from forerun.atomic_write import atomic_write

__all__ = ["append_line", "read_lines", "write_lines"]

Row = Mapping[str, object]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, none without one; a last line that was cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_lines(path: Path, rows: Iterable[Row]) -> None:
    """Write a file anew: what is appended next then begins a line of its own."""
    with atomic_write(path) as scratch:
        scratch.write_text("".join(map(line_of, rows)), encoding="utf-8")


def append_line(path: Path, row: Row) -> None:
    """Append an object to a file that ends with a whole line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line_of(row))


def line_of(row: Row) -> str:
    """An object as a line."""
    return json.dumps(row) + "\n"
