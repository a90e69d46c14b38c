"""Progress bars, and the seconds that each phase of an alignment takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from forerun.align.training.metrics import StepMetrics

__all__ = ["OnProgress", "Phases", "TrainingProgress"]

OnProgress = Callable[[int, int], None]
"""Told how many are done, and of how many, whenever that changes."""


class Phases:
    """Measures the phases of an alignment and draws their bars.

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
        """Add the seconds of the block to a phase."""
        started_s = time.monotonic()
        try:
            yield
        finally:
            spent_s = time.monotonic() - started_s
            self.seconds[name] = self.seconds.get(name, 0.0) + spent_s

    @contextmanager
    def bar(self, phase: str, what: str) -> Iterator[OnProgress]:
        """Run a phase with a progress bar; yields the function that reports progress."""
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
        """Run a phase of unknown length with a status line."""
        status: AbstractContextManager[object] = self.console.status(what)
        with self.phase(phase), status:
            yield


MEMORY = 0.9
"""Shown figures are running means that forget a tenth per step: single steps are noisy."""


class TrainingProgress:
    """Progress bar of the training; a context manager.

    Args:
        console: where to draw.
        num_steps: of the whole run.
        first_step: steps done before.
    """

    def __init__(self, console: Console, num_steps: int, first_step: int) -> None:
        self.num_steps = num_steps
        self.first_step = first_step
        self._bar = Progress(
            TextColumn("train"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: TaskID | None = None
        self._loss: float | None = None
        self._alpha: float | None = None
        self._speedup: float | None = None

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        self._task = self._bar.add_task(
            "train", total=self.num_steps, completed=self.first_step, figures=""
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self, metrics: StepMetrics) -> None:
        """Update the bar with the metrics of one step."""
        self._loss = smoothed(self._loss, metrics.loss)
        if metrics.acceptance_probability is not None:
            self._alpha = smoothed(self._alpha, metrics.acceptance_probability)
        self._draw(metrics.step)

    def judged(self, predicted_speedup: float) -> None:
        """Show the predicted speedup of the last judgement."""
        self._speedup = predicted_speedup
        self._draw(None)

    def _draw(self, step: int | None) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=step, figures=self.figures)

    @property
    def figures(self) -> str:
        """The figures beside the bar."""
        shown = [] if self._loss is None else [f"loss {self._loss:.3f}"]
        if self._alpha is not None:
            shown.append(f"alpha {self._alpha:.3f}")
        if self._speedup is not None:
            shown.append(f"predicted speedup {self._speedup:.2f}x")
        return "  ".join(shown)


def smoothed(before: float | None, now: float) -> float:
    """Return the running mean after one more value."""
    return now if before is None else MEMORY * before + (1 - MEMORY) * now
