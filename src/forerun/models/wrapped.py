"""Wrappers around a language model, whose subclasses change or time its passes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from jaxtyping import Float32, Int64
from torch import Tensor

from forerun.models.base import LanguageModel, ModelOutput, RowBatch
from forerun.models.one_call import DraftsInOneCall, LikelyTree, SampledTokens
from forerun.theory.stop_rule import StopRule


class WrappedModel:
    """A LanguageModel that passes every call on to another one."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.num_parameters = model.num_parameters
        self.num_layers = model.num_layers
        self.hidden_size = model.hidden_size
        self.max_context = model.max_context
        self.store = model.store
        self.device = model.device
        self.embed = model.embed
        self.final_norm = model.final_norm
        self.head = model.head

    def forward(self, batch: RowBatch) -> ModelOutput:
        """Run one pass of the model."""
        return self.model.forward(batch)

    def greedy_chain(
        self, batch: RowBatch, num_tokens: int, vocab_size: int
    ) -> Int64[Tensor, "sequences num_tokens"]:
        """Run a greedy chain of the model."""
        return self.model.greedy_chain(batch, num_tokens, vocab_size)


class ObservedModel(WrappedModel):
    """A WrappedModel that calls `begin` before and `end` after its passes."""

    @abstractmethod
    def begin(self) -> float:
        """Run before a pass; the returned value is passed to `end`."""

    @abstractmethod
    def end(self, begun: float, batch: RowBatch, num_passes: int) -> None:
        """Run after the passes of a call.

        Args:
            begun: what `begin` said.
            batch: of the first pass.
            num_passes: it and those after it: of one row per sequence in chains, of the nodes that
                are read in trees.
        """

    def forward(self, batch: RowBatch) -> ModelOutput:
        """Run one pass of the model between `begin` and `end`."""
        begun = self.begin()
        scores = self.model.forward(batch)
        self.end(begun, batch, 1)
        return scores

    def greedy_chain(
        self, batch: RowBatch, num_tokens: int, vocab_size: int
    ) -> Int64[Tensor, "sequences num_tokens"]:
        """Run a greedy chain between `begin` and `end`; it counts as one pass per token."""
        begun = self.begin()
        tokens = self.model.greedy_chain(batch, num_tokens, vocab_size)
        self.end(begun, batch, num_tokens)
        return tokens


class ObservedSampler(ObservedModel):
    """An ObservedModel for models that draft whole chains and trees in one call."""

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
        """Run a sampled chain between `begin` and `end`; it counts as one pass per drawn token."""
        assert isinstance(self.model, DraftsInOneCall)
        begun = self.begin()
        drawn = self.model.sampled_chain(
            batch, keys, temperatures, vocab_size, by_race=by_race, stops=stops
        )
        self.end(begun, batch, len(drawn.tokens))
        return drawn

    def likely_trees(
        self,
        batch: RowBatch,
        shapes: Sequence[tuple[int, int, int]],
        temperatures: Sequence[float],
        vocab_size: int,
    ) -> list[LikelyTree]:
        """Grow trees between `begin` and `end`; it counts as one pass per level."""
        assert isinstance(self.model, DraftsInOneCall)
        begun = self.begin()
        trees = self.model.likely_trees(batch, shapes, temperatures, vocab_size)
        self.end(begun, batch, max(depth for _, depth, _ in shapes))
        return trees
