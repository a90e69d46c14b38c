"""Preallocated KV for a fixed number of sequences, and the base class of models that use it."""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from forerun.errors import UnsupportedFeatures
from forerun.models.architecture import Architecture
from forerun.models.base import KVPrefix, LanguageModel, RowBatch, Span
from forerun.models.features import check_features
from forerun.models.memory import KVGeometry, bytes_needed
from forerun.models.slot_store import SlotStore
from forerun.models.slots import num_in_place

__all__ = ["ContiguousKVStore", "StoredModel", "chain_by_forward"]

HUGE_PAGE_BYTES = 2 << 20


def zeros(geometry: KVGeometry, device: torch.device) -> torch.Tensor:
    """Allocate the store's tensor, on Linux in huge pages because passes read it sequentially."""
    num_bytes = bytes_needed(geometry)
    if device.type != "cpu" or num_bytes < HUGE_PAGE_BYTES or sys.platform != "linux":
        return torch.zeros(geometry.shape, dtype=geometry.dtype, device=device)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them: everything works, slower
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=geometry.dtype).view(geometry.shape)


class ContiguousKVStore(SlotStore):
    """A KVStore in one tensor, so that one call commits or copies rows for all layers.

    Committing, forking and copying take one tensor operation; so does cutting all layers' views for
    a pass.
    """

    def __init__(self, geometry: KVGeometry, device: torch.device) -> None:
        super().__init__(geometry.num_slots, geometry.capacity, geometry.max_staged_rows)
        self.geometry = geometry
        self._data = zeros(geometry, device)

    @property
    def device(self) -> torch.device:
        """Device of the keys and values."""
        return self._data.device

    def stage(self, slot: int, start: int, num_rows: int) -> tuple[torch.Tensor, ...]:
        """Stage rows and return views to write their keys and values to.

        Returns:
            Views [1, kv_heads, num_rows, head_dim]: keys of layer l at 2l, values at 2l + 1.

        Raises:
            ValueError: the rows overwrite committed ones or leave a gap.
            NotEnoughMemory: the rows do not fit into the slot.
        """
        self.claim(slot, start, num_rows)
        return self.window(slot, start, start + num_rows)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, [slots, kv_heads, width, head_dim] each, as views."""
        return self._data[2 * index], self._data[2 * index + 1]

    def window(self, slot: int, start: int, end: int) -> tuple[torch.Tensor, ...]:
        """Rows [start, end) of a slot in every layer, as views laid out like those of `stage`."""
        return self._data[:, slot : slot + 1, :, start:end].unbind(0)

    def commit(self, slot: int, rows: Sequence[int]) -> None:
        """Commit the staged rows listed in `rows` and drop the other staged rows.

        They are ascending offsets from the committed length. No data move when they are a prefix of
        what is staged; otherwise the kept rows move forward.

        Raises:
            ValueError: the rows are not ascending or were never staged.
            NotEnoughMemory: the slot would exceed its capacity.
        """
        start = self._commit(slot, rows)
        num_placed = num_in_place(rows)
        if num_placed == len(rows):
            return
        moved = torch.tensor([start + row for row in rows[num_placed:]], device=self._data.device)
        sequence = self._data[:, slot]
        kept = sequence.index_select(2, moved)
        sequence[:, :, start + num_placed : start + len(rows)] = kept

    def fork(self, slot: int, num_tokens: int | None = None) -> int:
        """Copy the first `num_tokens` (None: all) committed tokens of `slot` into a new slot.

        Raises:
            ValueError: fewer are committed.
        """
        length = self._slots.length(slot) if num_tokens is None else num_tokens
        self._slots.check_prefix(slot, length)
        copy = self._slots.reserve()
        self._slots.fill(copy, length)
        if self._features is not None:
            self._features.copy(slot, copy, length)
        self._data[:, copy, :, :length] = self._data[:, slot, :, :length]
        return copy

    def export_prefix(self, slot: int, num_tokens: int) -> KVPrefix:
        """Return a copy of the KV of the first `num_tokens` committed tokens.

        Raises:
            ValueError: fewer are committed.
        """
        self._slots.check_prefix(slot, num_tokens)
        tensor = self._data[:, slot, :, :num_tokens].clone()
        if self._features is None:
            return KVPrefix(num_tokens=num_tokens, tensors=(tensor,))
        features = self._features.read(slot, 0, num_tokens)
        return KVPrefix(num_tokens=num_tokens, tensors=(tensor, features))

    def import_prefix(self, slot: int, prefix: KVPrefix) -> None:
        """Fill an empty slot with an exported prefix.

        Raises:
            ValueError: the slot is not empty, or features are kept and the prefix has none.
            NotEnoughMemory: the prefix exceeds the capacity.
        """
        tensor, *features = prefix.tensors
        check_features(prefix, self._features)
        self._slots.fill(slot, prefix.num_tokens)
        if self._features is not None:
            self._features.fill(slot, features[0])
        self._data[:, slot, :, : prefix.num_tokens] = tensor

    def keep_features(self, layers: tuple[int, ...]) -> None:
        """Store features of these layers with the KV from now on; see `KVStore`.

        Raises:
            ValueError: a slot is reserved, or the geometry has no hidden size.
            NotEnoughMemory: there is no room for them.
        """
        geometry = self.geometry
        if layers and not geometry.hidden_size:
            raise ValueError("a store without hidden_size in its geometry cannot keep features")
        self._renew_features(layers, geometry.hidden_size, geometry.dtype, self.device)


class StoredModel:
    """A LanguageModel whose sizes, store, device and dtype follow from its architecture and store.

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
        """Number of layers of the model."""
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
        """The store that holds this model's KV."""
        return self._store

    @property
    def device(self) -> torch.device:
        """Device of the inputs and of the logits."""
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
        """Stage the rows of a pass, and `num_later` further rows for every sequence."""
        for span in batch.spans:
            self._store.claim(span.slot, span.start, span.num_rows + num_later)


def chain_by_forward(
    model: LanguageModel, batch: RowBatch, num_tokens: int, vocab_size: int
) -> Int64[Tensor, "sequences num_tokens"]:
    """`LanguageModel.greedy_chain`, level by level: one pass per token, one row per sequence."""
    levels = [_most_likely(model, batch, vocab_size)]
    positions = batch.positions[batch.logit_rows]
    rows = torch.arange(len(batch.spans), device=batch.tokens.device)
    for depth in range(num_tokens - 1):
        level = RowBatch(
            tokens=levels[-1],
            positions=positions + (depth + 1),
            spans=tuple(
                Span(slot=s.slot, start=s.start + s.num_chain + depth, num_chain=1)
                for s in batch.spans
            ),
            logit_rows=rows,
        )
        levels.append(_most_likely(model, level, vocab_size))
    return torch.stack(levels, dim=1)


def _most_likely(model: LanguageModel, batch: RowBatch, vocab_size: int) -> Tensor:
    return model.forward(batch).logits[:, :vocab_size].argmax(dim=-1)
