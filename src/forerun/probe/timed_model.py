"""A language model that adds up the time spent inside it; the rest of a step is overhead."""

from __future__ import annotations

from forerun.models.base import LanguageModel, RowBatch, SampledChains
from forerun.models.wrapped import ObservedModel, ObservedSampler
from forerun.probe.stopwatch import Stopwatch

__all__ = ["TimedModel", "timed"]


class TimedModel(ObservedModel):
    """Another LanguageModel, unchanged but for the clock around its passes.

    Args:
        model: what does the work.
        stopwatch: of the model's device. It waits for the device at both ends of a pass, so work of
            the caller that would have overlapped with one no longer does.

    Attributes:
        inside_s: seconds spent in passes so far.
    """

    def __init__(self, model: LanguageModel, stopwatch: Stopwatch) -> None:
        super().__init__(model)
        self.stopwatch = stopwatch
        self.inside_s = 0.0

    def begin(self) -> float:
        """The time."""
        return self.stopwatch.now_s()

    def end(self, begun: float, batch: RowBatch, num_passes: int) -> None:
        """Add up."""
        self.inside_s += self.stopwatch.now_s() - begun


class TimedSampledModel(ObservedSampler, TimedModel):
    """A TimedModel over one that draws whole chains."""


def timed(model: LanguageModel, stopwatch: Stopwatch) -> TimedModel:
    """The model with a clock around all that it can do."""
    kind = TimedSampledModel if isinstance(model, SampledChains) else TimedModel
    return kind(model, stopwatch)
