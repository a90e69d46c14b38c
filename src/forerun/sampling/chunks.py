"""Splits work over the full vocabulary into row chunks, which bounds temporary memory."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["row_chunks"]

MAX_ELEMENTS = 1 << 22
"""Elements of one temporary: 32 MiB of int64 or fp64."""


def row_chunks(num_rows: int, width: int, max_elements: int = MAX_ELEMENTS) -> Iterator[slice]:
    """Yield consecutive slices of rows with at most `max_elements` elements each.

    A single row is never split: processors, races and residuals need it whole.
    """
    step = max(1, max_elements // max(width, 1))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
