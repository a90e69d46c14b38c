"""Durations of the phases of an alignment, and their progress on the screen or in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from forerun.align.workspace import StepMetrics

MEMORY = 0.9
"""Weight of earlier steps in the running means that the progress bar shows."""
OnProgress = Callable[[int, int], None]
"""Called with the number of items done and the number of all items, whenever the first grows."""


LINE_EVERY_S = 30.0
"""Between two lines of progress where there is no terminal to draw a bar on."""


class Phases:
    """Measures the durations of an alignment's phases and shows their progress."""

    def __init__(
        self, console: Console | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or Console(quiet=True)
        self.clock = clock
        self.seconds: dict[str, float] = {}

    def _lines(self, what: str) -> Callable[[int, int | None, str], None]:
        """Return what prints rate and time left now and then, unless a terminal shows bars."""
        begun_s = last_s = self.clock()
        first: int | None = None

        def show(num_done: int, num_all: int | None, figures: str = "") -> None:
            nonlocal last_s, first
            first = num_done if first is None else first
            now_s = self.clock()
            if self.console.is_terminal or now_s - last_s < LINE_EVERY_S or not num_all:
                return
            last_s = now_s
            rate = (num_done - first) / (now_s - begun_s)
            left = f"{(num_all - num_done) / rate / 60:.0f} min left" if rate else "time unknown"
            line = f"{what} {num_done:,}/{num_all:,}, {rate * 60:,.0f} a minute, {left}  {figures}"
            self.console.print(line.rstrip(), highlight=False, markup=False, soft_wrap=True)

        return show

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
            lines = self._lines(what)

            def on_progress(num_done: int, num_all: int) -> None:
                shown.update(task, completed=num_done, total=num_all)
                lines(num_done, num_all, "")

            yield on_progress
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
        if speedup is not None and speedup < 1.0:
            judged = [f"plain decoding is faster (speedup {speedup:.2f}x)"]
        means: dict[str, float] = {}
        with self.phase("training"), Progress(*columns, console=self.console) as shown:
            task = shown.add_task("  ".join(judged), total=num_steps, completed=first_step)
            lines = self._lines("training step")
            lines(first_step, num_steps, "")

            def on_step(metrics: StepMetrics) -> None:
                now = {"loss": metrics.loss, "alpha": metrics.acceptance_probability}
                for name, value in now.items():
                    if value is not None:
                        means[name] = MEMORY * means.get(name, value) + (1 - MEMORY) * value
                figures = [f"{name} {mean:.3f}" for name, mean in means.items()]
                text = "  ".join([*figures, *judged])
                shown.update(task, completed=metrics.step, description=text)
                lines(metrics.step, num_steps, text)

            yield on_step
