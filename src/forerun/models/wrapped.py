"""Wrappers around a language model, whose subclasses change or time its passes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from forerun.models.base import LanguageModel, ModelOutput, RowBatch, SampledChains, SampledTokens
from forerun.models.kv_store import KVStore
from forerun.theory.stop_rule import StopRule

__all__ = ["ObservedModel", "ObservedSampler", "WrappedModel"]


class WrappedModel:
    """A LanguageModel that passes every call on to another one.

    Args:
        model: does the work.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.model.vocab_size

    @property
    def num_parameters(self) -> int:
        """Number of parameters; tied parameters are counted once."""
        return self.model.num_parameters

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return self.model.num_layers

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream, and so of features."""
        return self.model.hidden_size

    @property
    def max_context(self) -> int:
        """Largest number of tokens (prompt and output) one sequence may have."""
        return self.model.max_context

    @property
    def store(self) -> KVStore:
        """The store that holds the model's KV."""
        return self.model.store

    @property
    def device(self) -> torch.device:
        """Device of the inputs and of the logits."""
        return self.model.device

    def forward(self, batch: RowBatch) -> ModelOutput:
        """Run one pass of the model."""
        return self.model.forward(batch)

    def embed(self, tokens: Int64[Tensor, " rows"]) -> Float[Tensor, "rows width"]:
        """Return the token embeddings of the model."""
        return self.model.embed(tokens)

    def final_norm(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        """Apply the final norm of the model."""
        return self.model.final_norm(hidden)

    def head(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"]:
        """Return the logits of rows after the final norm."""
        return self.model.head(hidden)

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
            num_passes: it and those after it, of one row per sequence.
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
    """An ObservedModel for models that draw whole chains in one call."""

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
        assert isinstance(self.model, SampledChains)
        begun = self.begin()
        drawn = self.model.sampled_chain(
            batch, keys, temperatures, vocab_size, by_race=by_race, stops=stops
        )
        self.end(begun, batch, len(drawn.tokens))
        return drawn
