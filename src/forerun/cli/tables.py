"""The look that all tables of figures share."""

from __future__ import annotations

from rich import box
from rich.table import Column, Table

from forerun.theory.intervals import Interval

__all__ = ["table_of", "with_ends"]


def table_of(first: Column, *others: str, title: str | None = None) -> Table:
    """An empty table with what a line is about on the left and figures on the right.

    Args:
        first: the column of names; it says what becomes of names that are too long.
        others: headings of the figures.
        title: above the table.
    """
    table = Table(
        first,
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def with_ends(interval: Interval, spec: str) -> str:
    """An estimate over its interval."""
    low, high = format(interval.low, spec), format(interval.high, spec)
    return f"{format(interval.estimate, spec)}\n({low}–{high})"
