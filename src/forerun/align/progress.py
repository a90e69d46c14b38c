"""Logs metrics of training steps and durations of phases, and shows progress bars."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from forerun.align.workspace import append_line, read_lines, write_lines

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one optimiser step, over all processes.

    Attributes:
        loss: mean over learned rows, as the objective counts.
        acceptance_probability: alpha, mean over learned rows; None without a teacher.
        num_tokens: places of the packed rows, padding included.
    """

    step: int
    loss: float
    acceptance_probability: float | None
    num_learned: int
    num_tokens: int
    grad_norm: float
    learning_rate: float
    duration_s: float


class MetricsLog:
    """Writes the metrics of a run to one file, which resumed runs continue."""

    def __init__(self, path: Path, events: Path | None = None) -> None:
        self.path = path
        self.events = events
        self._writer: SummaryWriter | None = None

    def open_at(self, step: int) -> MetricsLog:
        """Start the log, or continue it after an earlier step; use as a context manager."""
        write_lines(self.path, (row for row in read_metrics(self.path) if row.step <= step))
        if self.events is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.events), purge_step=step + 1)
        return self

    def append(self, metrics: StepMetrics) -> None:
        append_line(self.path, metrics)
        if self._writer is not None:
            for name, value in asdict(metrics).items():
                if value is not None and name != "step":
                    self._writer.add_scalar(f"train/{name}", value, metrics.step)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *error: object) -> None:
        if self._writer is not None:
            self._writer.close()


def read_metrics(path: Path) -> list[StepMetrics]:
    return read_lines(path, StepMetrics)


MEMORY = 0.9
"""Shown figures are running means that forget a tenth per step: single steps are noisy."""
OnProgress = Callable[[int, int], None]
"""Told how many are done, and of how many, whenever that changes."""


class Phases:
    """Measures the durations of an alignment's phases and shows their progress bars."""

    def __init__(self, console: Console | None) -> None:
        self.console = console or Console(quiet=True)
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started_s = time.monotonic()
        try:
            yield
        finally:
            spent_s = time.monotonic() - started_s
            self.seconds[name] = self.seconds.get(name, 0.0) + spent_s

    @contextmanager
    def bar(self, phase: str, what: str) -> Iterator[OnProgress]:
        """Run a phase with a progress bar; yields the callback that updates the bar."""
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

    @contextmanager
    def training(
        self, num_steps: int, first_step: int, speedup: float | None
    ) -> Iterator[Callable[[StepMetrics], None]]:
        """Run the training with a bar of steps; yields the callback that shows their metrics."""
        columns = (
            TextColumn("train"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        judged = [] if speedup is None else [f"predicted speedup {speedup:.2f}x"]
        means: dict[str, float] = {}
        with self.phase("training"), Progress(*columns, console=self.console) as shown:
            task = shown.add_task("  ".join(judged), total=num_steps, completed=first_step)

            def on_step(metrics: StepMetrics) -> None:
                now = {"loss": metrics.loss, "alpha": metrics.acceptance_probability}
                for name, value in now.items():
                    if value is not None:
                        means[name] = MEMORY * means.get(name, value) + (1 - MEMORY) * value
                figures = [f"{name} {mean:.3f}" for name, mean in means.items()]
                shown.update(
                    task, completed=metrics.step, description="  ".join([*figures, *judged])
                )

            yield on_step
