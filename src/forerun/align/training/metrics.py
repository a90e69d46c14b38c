"""Metrics of training steps, in a file of JSON lines and for TensorBoard."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.align.json_files import append_line, read_lines, write_lines

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["MetricsLog", "StepMetrics", "read_metrics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one optimiser step, over all processes.

    Attributes:
        step: steps done, this one included.
        loss: mean over learned rows, as the objective counts.
        acceptance_probability: alpha, mean over learned rows; None without a teacher.
        num_learned: rows both are means over.
        num_tokens: places of the packed rows, padding included.
        grad_norm: before clipping.
        learning_rate: of this step.
        duration_s: of this step.
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
    """Writes the metrics of a run, to one file however often the run is interrupted.

    What a killed process had logged after its last checkpoint is done again when the run goes on,
    so those lines are dropped and every step is there once.

    Args:
        path: of the .jsonl file.
        events: folder for TensorBoard; None for none.
    """

    def __init__(self, path: Path, events: Path | None = None) -> None:
        self.path = path
        self.events = events
        self._writer: SummaryWriter | None = None

    def open_at(self, step: int) -> MetricsLog:
        """Start the log, or continue it after a step; use as a context manager."""
        write_lines(self.path, (row for row in read_metrics(self.path) if row.step <= step))
        if self.events is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.events), purge_step=step + 1)
        return self

    def append(self, metrics: StepMetrics) -> None:
        """Write the metrics of one step."""
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
    """Read the metrics of a run."""
    return read_lines(path, StepMetrics)
