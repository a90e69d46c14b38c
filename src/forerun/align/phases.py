"""How long the phases of an alignment take, and what the terminal shows meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Phases", "Tell"]

Tell = Callable[[int, int], None]
"""Told how many are done, and of how many, whenever that changes."""


class Phases:
    """Seconds by phase, and bars.

    Args:
        console: to draw on; None shows nothing, as in all processes but the main one.

    Attributes:
        seconds: spent in every phase.
    """

    def __init__(self, console: Console | None) -> None:
        self.console = console or Console(quiet=True)
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds of a phase."""
        started_s = time.monotonic()
        try:
            yield
        finally:
            spent_s = time.monotonic() - started_s
            self.seconds[name] = self.seconds.get(name, 0.0) + spent_s

    @contextmanager
    def bar(self, phase: str, what: str) -> Iterator[Tell]:
        """A phase with a bar for whatever says how many of how many are done."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with self.phase(phase), Progress(*columns, console=self.console) as shown:
            task = shown.add_task(what, total=None)
            yield lambda num_done, num_all: shown.update(task, completed=num_done, total=num_all)
            if shown.tasks[0].total is None:  # there was nothing to do
                shown.update(task, visible=False)

    @contextmanager
    def waiting(self, phase: str, what: str) -> Iterator[None]:
        """A phase that cannot say how far it is."""
        status: AbstractContextManager[object] = self.console.status(what)
        with self.phase(phase), status:
            yield
