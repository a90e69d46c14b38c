"""Another language model, and whatever a subclass makes of its passes."""

from __future__ import annotations

import torch
from jaxtyping import Int64
from torch import Tensor

from forerun.models.base import KVStore, LanguageModel, RowBatch, Scores

__all__ = ["WrappedModel"]


class WrappedModel:
    """A LanguageModel that does what another one does, in its KV.

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
        """Size of the model, tied parameters counted once."""
        return self.model.num_parameters

    @property
    def max_context(self) -> int:
        """Largest number of tokens (prompt and output) one sequence may have."""
        return self.model.max_context

    @property
    def store(self) -> KVStore:
        """Where the model's KV lives."""
        return self.model.store

    @property
    def device(self) -> torch.device:
        """Where inputs are expected and logits are returned."""
        return self.model.device

    def forward(self, batch: RowBatch) -> Scores:
        """One pass of the model."""
        return self.model.forward(batch)

    def greedy_chain(
        self, batch: RowBatch, num_tokens: int, vocab_size: int
    ) -> Int64[Tensor, "sequences num_tokens"]:
        """A greedy chain of the model."""
        return self.model.greedy_chain(batch, num_tokens, vocab_size)
