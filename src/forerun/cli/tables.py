"""Printing of tables, intervals and progress for all commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.status import Status
from rich.table import Column, Table
from rich.text import Text

from forerun.terminal_text import printable
from forerun.theory.intervals import Interval

WIDEST = 4096
"""Columns a table may ask for; a terminal wraps what it cannot show."""


class SafeConsole(Console):
    """A console that removes control characters from printed text of files and models."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        for table in objects:
            if isinstance(table, Table):
                room = self.options.update(max_width=WIDEST)
                self.width = max(self.width, self.measure(table, options=room).maximum)
        super().print(*map(safe, objects), **options)

    def on_broken_pipe(self) -> None:
        """Leave it to the command to end quietly when the reader of the output has gone."""
        raise BrokenPipeError

    def status(self, status: Any, **options: Any) -> Any:
        return super().status(safe(status), **options)


def status_text(status: Status) -> Callable[[str], None]:
    return lambda text: status.update(escape(safe(text)))


def safe(item: Any) -> Any:
    """Escape control characters in a text; other objects are returned unchanged."""
    if isinstance(item, str):
        return printable(item, keep="\n\t")
    if isinstance(item, Text) and (shown := printable(item.plain, keep="\n\t")) != item.plain:
        return Text(shown)
    return item


class FigureTable(Table):
    """A table whose cells are safe to print."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*map(safe, cells), **options)


def table_of(first: Column, *others: Column | str, title: str | None = None) -> FigureTable:
    """Return a table; a column given by its heading alone has figures, to the right."""
    return FigureTable(
        first,
        *(Column(o, justify="right", no_wrap=True) if isinstance(o, str) else o for o in others),
        title=None if title is None else safe(title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )


def with_ends(interval: Interval | None, spec: str) -> str:
    """Return the cell of a figure, with its interval on a line of its own."""
    return "" if interval is None else interval.show(spec, "\n")


def rates(values: Sequence[float], most: int = 6) -> str:
    """Return the first shares of a list as text, such as ".81 .62 .5"."""
    shown = [f"{value:.2f}".removeprefix("0") for value in values[:most]]
    return " ".join([*shown, *(["…"] if len(values) > most else [])])


def milliseconds(s: float, error_s: float | None = None) -> str:
    """Return a time in milliseconds with three decimals, and its error if there is one."""
    return f"{1e3 * s:.3f}" + ("" if error_s is None else f" ±{1e3 * error_s:.3f}")


@contextmanager
def progress_bar(first: str, total: float) -> Iterator[Callable[[str, float], None]]:
    """Show a bar on stderr while the block runs; the yielded function updates it."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=SafeConsole(stderr=True), transient=True) as bar:
        task = bar.add_task(first, total=total)

        def report(what: str, done: float) -> None:
            bar.update(task, description=what, completed=done)

        yield report
