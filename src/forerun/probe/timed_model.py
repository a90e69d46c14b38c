"""A language model that adds up the time spent inside it; the rest of a step is overhead."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float32, Int64
from torch import Tensor

from forerun.models.base import LanguageModel, RowBatch, SampledChains, SampledTokens, Scores
from forerun.models.wrapped import WrappedModel
from forerun.probe.stopwatch import Stopwatch
from forerun.theory.stop_rule import StopRule

__all__ = ["TimedModel", "timed"]


class TimedModel(WrappedModel):
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

    def forward(self, batch: RowBatch) -> Scores:
        """One pass of the model, timed."""
        start_s = self.stopwatch.now_s()
        scores = self.model.forward(batch)
        self.inside_s += self.stopwatch.now_s() - start_s
        return scores

    def greedy_chain(
        self, batch: RowBatch, num_tokens: int, vocab_size: int
    ) -> Int64[Tensor, "sequences num_tokens"]:
        """A greedy chain of the model, timed."""
        start_s = self.stopwatch.now_s()
        tokens = self.model.greedy_chain(batch, num_tokens, vocab_size)
        self.inside_s += self.stopwatch.now_s() - start_s
        return tokens


class TimedSampledModel(TimedModel):
    """A TimedModel over one that draws whole chains."""

    def sampled_chain(
        self,
        batch: RowBatch,
        keys: Int64[Tensor, "num_tokens sequences"],
        temperatures: Float32[Tensor, " sequences"],
        vocab_size: int,
        *,
        by_race: bool,
        stops: Sequence[StopRule | None] = (),
    ) -> SampledTokens:
        """A sampled chain of the model, timed."""
        assert isinstance(self.model, SampledChains)
        start_s = self.stopwatch.now_s()
        drawn = self.model.sampled_chain(
            batch, keys, temperatures, vocab_size, by_race=by_race, stops=stops
        )
        self.inside_s += self.stopwatch.now_s() - start_s
        return drawn


def timed(model: LanguageModel, stopwatch: Stopwatch) -> TimedModel:
    """The model with a clock around all that it can do."""
    kind = TimedSampledModel if isinstance(model, SampledChains) else TimedModel
    return kind(model, stopwatch)
