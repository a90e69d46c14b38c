"""KV of a fixed number of sequences: the contract of a store, and a store in one tensor.

A drafter that reads features must have them for every committed token, those found in a shared
prefix included. So a store holds them by the same rows as the KV: they are staged after a pass,
move with a commit and are copied with a prefix, and a commit without them is an error.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.errors import NotEnoughMemory
from forerun.models.memory import BLOCK_ROWS, KVGeometry, available_bytes, bytes_needed, readable
from forerun.models.slots import Prefix, SlotTable, num_in_place


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVPrefix:
    """A copy of a committed prefix, which only stores of the same class can import."""

    num_tokens: int
    tensors: tuple[Tensor, ...]


class FeatureRows:
    """Features of every row of every slot of a store.

    `num_valid` rows at the beginning of a slot have features; a pass that writes rows again makes
    theirs invalid until they are staged again.
    """

    def __init__(
        self,
        layers: tuple[int, ...],
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        num_slots, num_rows, width = shape
        num_bytes = num_slots * num_rows * len(layers) * width * dtype.itemsize
        available = available_bytes(device)
        if num_bytes > available:
            raise NotEnoughMemory(
                f"features of {len(layers)} layers need {readable(num_bytes)} on {device} for "
                f"{num_slots} sequences of {num_rows} rows, {readable(available)} are available; "
                "lower max_batch or max_context"
            )
        self.layers = layers
        self.rows = torch.zeros(
            (num_slots, num_rows, len(layers), width), dtype=dtype, device=device
        )
        self._num_valid = [0] * num_slots

    def invalidate(self, slot: int, start: int) -> None:
        self._num_valid[slot] = min(self._num_valid[slot], start)

    def stage(
        self, slot: int, start: int, num_written: int, features: Float[Tensor, "rows layers width"]
    ) -> None:
        """Store the features of rows `start` and following of a slot with `num_written` rows."""
        end = start + len(features)
        if features.shape[1:] != self.rows.shape[2:]:
            raise ValueError(
                f"features have the shape {tuple(features.shape[1:])} per row; the store keeps "
                f"{tuple(self.rows.shape[2:])} (layers, width)"
            )
        self.note_stored(slot, start, end, num_written)
        self.rows[slot, start:end] = features

    def note_stored(self, slot: int, start: int, end: int, num_written: int) -> None:
        """Count the features of rows as valid, of a slot with `num_written` rows."""
        if not start <= self._num_valid[slot] or end > num_written:
            raise ValueError(
                f"features of rows {start} to {end} of slot {slot} cannot be stored: "
                f"{num_written} rows are written, {self._num_valid[slot]} have features"
            )
        self._num_valid[slot] = end

    def check_commit(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """Refuse a commit of rows without features."""
        if rows and start + rows[-1] >= self._num_valid[slot]:
            raise ValueError(
                f"row {rows[-1]} of slot {slot} is to be committed without features; the store "
                f"keeps those of layers {self.layers}: call stage_features after every pass"
            )

    def commit(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """Move features of committed rows together; `rows` ascend and are relative to `start`."""
        end = start + len(rows)
        if rows and rows[-1] != len(rows) - 1:
            places = torch.tensor([start + row for row in rows], device=self.rows.device)
            self.rows[slot, start:end] = self.rows[slot].index_select(0, places)
        self._num_valid[slot] = end

    def copy(self, slot: int, other: int, num_tokens: int) -> None:
        """Copy the features of the first tokens of `slot` to an empty slot."""
        self.rows[other, :num_tokens] = self.rows[slot, :num_tokens]
        self._num_valid[other] = num_tokens

    def read(self, slot: int, start: int, stop: int) -> Float[Tensor, "rows layers width"]:
        """A copy of the features of rows [start, stop)."""
        return self.rows[slot, start:stop].clone()


class KVStore(ABC):
    """Per-sequence state of a model; subclasses store the rows, in a layout of their own.

    Rows past the committed length are staged: they are there until the next commit.

    Args:
        max_staged_rows: rows that may be staged past `capacity`.
    """

    def __init__(self, num_slots: int, capacity: int, max_staged_rows: int) -> None:
        self._slots = SlotTable(num_slots, capacity, max_staged_rows)
        self._features: FeatureRows | None = None

    @property
    def num_free(self) -> int:
        """Number of slots that are not reserved."""
        return self._slots.num_free

    @property
    def shares_parts(self) -> bool:
        """Whether a sequence may begin with a part of what a slot holds."""
        return self._slots.snapshot_lengths is None

    def reserve(self) -> int:
        """Take a free slot with committed length 0. Raises NotEnoughMemory when none is left."""
        return self._slots.reserve()

    def length(self, slot: int) -> int:
        """Number of committed tokens in `slot`."""
        return self._slots.length(slot)

    def claim(self, slot: int, start: int, num_rows: int, *, writes_features: bool = False) -> None:
        """Stage rows whose contents the caller writes; SlotTable.stage lists the errors.

        Args:
            writes_features: the caller writes `feature_rows`, too.
        """
        self._slots.stage(slot, start, num_rows)
        if self._features is not None:
            self._features.invalidate(slot, start)
            if writes_features:
                end = start + num_rows
                self._features.note_stored(slot, start, end, self._slots.num_written(slot))

    @abstractmethod
    def commit(self, slot: int, rows: Sequence[int]) -> None:
        """Commit the staged rows listed in `rows` and drop the other staged rows.

        They are ascending offsets from the committed length.

        Raises:
            ValueError: the rows are not ascending or were never staged.
            NotEnoughMemory: the slot would exceed its capacity.
        """

    def begin(self, wanted: Prefix) -> int:
        """Reserve a slot that already contains the longest stored prefix of `wanted`.

        The last token is never among them. Until it is given back, others find in this slot what it
        has committed. Raises NotEnoughMemory when no slot is left.
        """
        slot = self._slots.begin(wanted, self.fork)
        if self._features is not None:
            self._features.invalidate(slot, self._slots.length(slot))
        return slot

    def keep(self, slot: int, num_tokens: int) -> None:
        """Free `slot`, but store its first tokens for `begin` until the memory is needed."""
        self._slots.keep(slot, num_tokens)

    def cut(self, slot: int, num_tokens: int) -> None:
        """Drop all tokens and staged rows of `slot` after its first `num_tokens` tokens."""
        self._slots.cut(slot, num_tokens)
        if self._features is not None:
            self._features.invalidate(slot, num_tokens)

    @abstractmethod
    def fork(self, slot: int, num_tokens: int | None = None) -> int:
        """Copy the first `num_tokens` (None: all) committed tokens of `slot` into a new slot."""

    @abstractmethod
    def export_prefix(self, slot: int, num_tokens: int) -> KVPrefix:
        """Return a copy of the KV of the first `num_tokens` committed tokens."""

    @abstractmethod
    def import_prefix(self, slot: int, prefix: KVPrefix) -> None:
        """Fill an empty slot with an exported prefix."""

    def free(self, slot: int) -> None:
        """Free `slot` and discard its contents."""
        self._slots.free(slot)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers whose features the store holds; see `keep_features`."""
        return () if self._features is None else self._features.layers

    @property
    def feature_rows(self) -> Float[Tensor, "slots rows layers width"] | None:
        """The features themselves, which may be written in place; None where none are kept."""
        return None if self._features is None else self._features.rows

    @abstractmethod
    def keep_features(self, layers: tuple[int, ...]) -> None:
        """Store features of these layers with the KV from now on; an empty sequence ends this.

        From then on every commit needs the features of its rows. Kept prefixes of earlier sequences
        are forgotten. No slot may be reserved.

        Raises:
            NotEnoughMemory: there is no room for them.
        """

    def stage_features(
        self, slot: int, start: int, features: Float[Tensor, "rows layers width"]
    ) -> None:
        """Store the features that a pass returned for the staged rows from `start` on."""
        self._kept_features().stage(slot, start, self._slots.num_written(slot), features)

    def features(self, slot: int, start: int, stop: int) -> Float[Tensor, "rows layers width"]:
        """A copy of the features of committed rows [start, stop)."""
        self._slots.check_prefix(slot, stop)
        return self._kept_features().read(slot, start, stop)

    def _kept_features(self) -> FeatureRows:
        if self._features is None:
            raise ValueError("this store keeps no features; call keep_features(layers) first")
        return self._features

    def _commit(self, slot: int, rows: Sequence[int]) -> int:
        """Commit staged rows and their features; return the committed length before this call."""
        if self._features is not None:
            self._features.check_commit(slot, self._slots.length(slot), rows)
        start = self._slots.commit(slot, rows)
        if self._features is not None:
            self._features.commit(slot, start, rows)
        return start

    def _exported(self, slot: int, num_tokens: int, content: Tensor) -> KVPrefix:
        """Return a prefix with this content and the features of its tokens."""
        if self._features is None:
            return KVPrefix(num_tokens=num_tokens, tensors=(content,))
        features = self._features.read(slot, 0, num_tokens)
        return KVPrefix(num_tokens=num_tokens, tensors=(content, features))

    def _fill(self, slot: int, prefix: KVPrefix) -> Tensor:
        """Commit the tokens and features of a prefix in an empty slot; return its content."""
        content, *features = prefix.tensors
        if self._features is not None and not features:
            raise ValueError("the prefix was exported without features, which this store keeps")
        self._slots.fill(slot, prefix.num_tokens)
        if self._features is not None:
            self._features.invalidate(slot, 0)
            self._features.stage(slot, 0, prefix.num_tokens, features[0])
        return content

    def _renew_features(
        self, layers: tuple[int, ...], width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Discard stored prefixes, and store features of these layers from now on."""
        slots = self._slots
        slots.forget_kept()
        self._features = None
        if layers:
            shape = (slots.num_slots, slots.capacity + slots.max_staged_rows, width)
            self._features = FeatureRows(layers, shape, dtype, device)


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


class TensorKVStore(KVStore):
    """A KVStore in one tensor, so that one call commits or copies rows for all layers.

    Attributes:
        data: keys of layer l at 2l, values at 2l + 1, each [slots, kv_heads, width, head_dim].
    """

    def __init__(self, geometry: KVGeometry, device: torch.device) -> None:
        super().__init__(geometry.num_slots, geometry.capacity, geometry.max_staged_rows)
        self.geometry = geometry
        self.data = zeros(geometry, device)

    @property
    def device(self) -> torch.device:
        return self.data.device

    @abstractmethod
    def _take(self, slot: int, rows: Tensor) -> Tensor:
        """Return a copy of rows of a slot, [2 * layers, kv_heads, rows, head_dim]."""

    @abstractmethod
    def _put(self, slot: int, rows: Tensor, content: Tensor) -> None:
        """Write rows of a slot, given as `_take` returns them."""

    def _places(self, rows: Iterable[int]) -> Tensor:
        return torch.tensor([*rows], dtype=torch.int64, device=self.device)

    def commit(self, slot: int, rows: Sequence[int]) -> None:
        """Commit staged rows; no data move when they are a prefix of what is staged."""
        start = self._commit(slot, rows)
        num_placed = num_in_place(rows)
        if num_placed == len(rows):
            return
        kept = self._take(slot, self._places(start + row for row in rows[num_placed:]))
        self._put(slot, self._places(range(start + num_placed, start + len(rows))), kept)

    def fork(self, slot: int, num_tokens: int | None = None) -> int:
        length = self._slots.length(slot) if num_tokens is None else num_tokens
        self._slots.check_prefix(slot, length)
        copy = self._slots.reserve()
        self._slots.fill(copy, length)
        if self._features is not None:
            self._features.copy(slot, copy, length)
        num_rows = -(-length // BLOCK_ROWS) * BLOCK_ROWS
        self.data[:, copy, :, :num_rows] = self.data[:, slot, :, :num_rows]
        return copy

    def export_prefix(self, slot: int, num_tokens: int) -> KVPrefix:
        self._slots.check_prefix(slot, num_tokens)
        content = self._take(slot, self._places(range(num_tokens)))
        return self._exported(slot, num_tokens, content)

    def import_prefix(self, slot: int, prefix: KVPrefix) -> None:
        content = self._fill(slot, prefix)
        self._put(slot, self._places(range(prefix.num_tokens)), content)

    def keep_features(self, layers: tuple[int, ...]) -> None:
        geometry = self.geometry
        if layers and not geometry.hidden_size:
            raise ValueError("a store without hidden_size in its geometry cannot keep features")
        self._renew_features(layers, geometry.hidden_size, geometry.dtype, self.device)


class ContiguousKVStore(TensorKVStore):
    """A KV store whose rows lie one after another, which torch reads as views."""

    def stage(self, slot: int, start: int, num_rows: int) -> tuple[torch.Tensor, ...]:
        """Stage rows and return views to write their keys and values to.

        The views are [1, kv_heads, num_rows, head_dim]: keys of layer l at 2l, values at 2l + 1.

        Raises:
            NotEnoughMemory: the rows do not fit into the slot.
        """
        self.claim(slot, start, num_rows)
        return self.window(slot, start, start + num_rows)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, [slots, kv_heads, width, head_dim] each, as views."""
        return self.data[2 * index], self.data[2 * index + 1]

    def window(self, slot: int, start: int, end: int) -> tuple[torch.Tensor, ...]:
        """Rows [start, end) of a slot in every layer, as views laid out like those of `stage`."""
        return self.data[:, slot : slot + 1, :, start:end].unbind(0)

    def _take(self, slot: int, rows: Tensor) -> Tensor:
        return self.data[:, slot].index_select(2, rows)

    def _put(self, slot: int, rows: Tensor, content: Tensor) -> None:
        self.data[:, slot].index_copy_(2, rows, content)


class BlockedKVStore(TensorKVStore):
    """The KV store of the C++ kernels, which keeps keys in the order in which they are multiplied.

    Values lie row after row. The keys of every 16 rows share a block: the first four bytes of each,
    then the next four.
    """

    def _take(self, slot: int, rows: Tensor) -> Tensor:
        keys = self._keys(slot)[:, :, rows // BLOCK_ROWS, rows % BLOCK_ROWS].flatten(-2)
        return torch.stack((keys, self.data[1::2, slot][:, :, rows]), 1).flatten(0, 1)

    def _put(self, slot: int, rows: Tensor, content: Tensor) -> None:
        keys = self._keys(slot)
        given = content[0::2].reshape(*content[0::2].shape[:3], *keys.shape[-2:])
        keys[:, :, rows // BLOCK_ROWS, rows % BLOCK_ROWS] = given
        self.data[1::2, slot].index_copy_(2, rows, content[1::2])

    def _keys(self, slot: int) -> Tensor:
        """Keys of a slot, [layers, kv_heads, blocks, rows of a block, words, values of a word]."""
        keys = self.data[0::2, slot]
        num_layers, num_heads, width, head_dim = keys.shape
        depth = 4 // keys.itemsize
        shape = (width // BLOCK_ROWS, head_dim // depth, BLOCK_ROWS, depth)
        return keys.view(num_layers, num_heads, *shape).transpose(3, 4)
