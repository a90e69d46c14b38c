"""Base class of the models of all runners: sizes and a KV store."""

from __future__ import annotations

import torch

from forerun.errors import UnsupportedFeatures
from forerun.models.architecture import Architecture
from forerun.models.base import RowBatch
from forerun.models.kv_store import ContiguousKVStore

__all__ = ["StoredModel"]


class StoredModel:
    """The properties of a LanguageModel that follow from its sizes and its store.

    Args:
        architecture: sizes, the number of layers a pass goes through among them.
        store: KV of the sequences, on the device of the weights and in their dtype.
    """

    def __init__(self, architecture: Architecture, store: ContiguousKVStore) -> None:
        self.architecture = architecture
        self._store = store

    @property
    def vocab_size(self) -> int:
        """Width of the logits; may exceed the tokenizer's vocabulary."""
        return self.architecture.vocab_size

    @property
    def num_layers(self) -> int:
        """Layers a pass goes through."""
        return self.architecture.num_layers

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream, and so of features."""
        return self.architecture.hidden_size

    @property
    def max_context(self) -> int:
        """Largest number of tokens (prompt and output) one sequence may have."""
        return self._store.geometry.capacity

    @property
    def store(self) -> ContiguousKVStore:
        """Where this model's KV lives."""
        return self._store

    @property
    def device(self) -> torch.device:
        """Where inputs are expected and logits are returned."""
        return self._store.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of weights and KV."""
        return self._store.geometry.dtype

    def _check_features(self, layers: tuple[int, ...]) -> None:
        """Refuse layers the model does not have.

        Raises:
            UnsupportedFeatures: one is negative or above `num_layers`.
        """
        for layer in layers:
            if not 0 <= layer <= self.num_layers:
                raise UnsupportedFeatures(
                    f"features of layer {layer} were asked for; {self.architecture.name} has "
                    f"layers 0 to {self.num_layers} (what leaves the last one)"
                )

    def _claim(self, batch: RowBatch, num_later: int = 0) -> None:
        """Stage the rows of a pass, and `num_later` rows behind those of every sequence."""
        for span in batch.spans:
            self._store.claim(span.slot, span.start, span.num_rows + num_later)
