"""A training as it goes: loss, acceptance, the speedup it would bring, and when it is done."""

from __future__ import annotations

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

from forerun.align.training.metrics import StepMetrics

__all__ = ["TrainingProgress"]

MEMORY = 0.9
"""Shown figures are running means that forget a tenth per step: single steps are noisy."""


class TrainingProgress:
    """A bar on the terminal; use as a context manager.

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
        """Take in one step."""
        self._loss = smoothed(self._loss, metrics.loss)
        if metrics.acceptance_probability is not None:
            self._alpha = smoothed(self._alpha, metrics.acceptance_probability)
        self._draw(metrics.step)

    def judged(self, predicted_speedup: float) -> None:
        """The speedup the draft would bring as it is now, by the last judgement."""
        self._speedup = predicted_speedup
        self._draw(None)

    def _draw(self, step: int | None) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=step, figures=self.figures)

    @property
    def figures(self) -> str:
        """What stands beside the bar."""
        shown = [] if self._loss is None else [f"loss {self._loss:.3f}"]
        if self._alpha is not None:
            shown.append(f"alpha {self._alpha:.3f}")
        if self._speedup is not None:
            shown.append(f"predicted speedup {self._speedup:.2f}x")
        return "  ".join(shown)


def smoothed(before: float | None, now: float) -> float:
    """A running mean."""
    return now if before is None else MEMORY * before + (1 - MEMORY) * now
