"""The bar on stderr that fills while something is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(first: str, total: float) -> Iterator[Callable[[str, float], None]]:
    """A bar that is gone afterwards; what it yields takes what is being done and how much is done.

    Args:
        first: what is being done at the beginning.
        total: how much there is to do.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(first, total=total)

        def tell(what: str, done: float) -> None:
            bar.update(task, description=what, completed=done)

        yield tell
