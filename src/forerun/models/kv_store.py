"""Preallocated KV for a fixed number of sequences, each contiguous."""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forerun.models.architecture import Architecture
from forerun.models.base import KVPrefix
from forerun.models.prefixes import Prefix
from forerun.models.slots import SlotTable, num_in_place

__all__ = ["ContiguousKVStore", "KVGeometry", "bytes_needed", "geometry_of"]


HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """What a store is sized by.

    Attributes:
        num_layers: attention layers.
        num_kv_heads: key/value heads per layer.
        head_dim: width of a head.
        num_slots: sequences.
        capacity: tokens a sequence may commit.
        max_staged_rows: rows that may be staged past the capacity.
        dtype: of keys and values.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_slots: int
    capacity: int
    max_staged_rows: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the one tensor: keys of layer l at 2l, values at 2l + 1; then slots."""
        width = self.capacity + self.max_staged_rows
        return (2 * self.num_layers, self.num_slots, self.num_kv_heads, width, self.head_dim)


def geometry_of(
    architecture: Architecture,
    *,
    num_slots: int,
    capacity: int,
    max_staged_rows: int,
    dtype: torch.dtype,
) -> KVGeometry:
    """The KV store a model of this architecture needs."""
    return KVGeometry(
        num_layers=architecture.num_layers,
        num_kv_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        num_slots=num_slots,
        capacity=capacity,
        max_staged_rows=max_staged_rows,
        dtype=dtype,
    )


def bytes_needed(geometry: KVGeometry) -> int:
    """Bytes a store of this geometry allocates."""
    return torch.Size(geometry.shape).numel() * geometry.dtype.itemsize


def zeros(geometry: KVGeometry, device: torch.device) -> torch.Tensor:
    """The store's one tensor. On Linux in huge pages: a pass reads it from one end to the other."""
    num_bytes = bytes_needed(geometry)
    if device.type != "cpu" or num_bytes < HUGE_PAGE_BYTES or sys.platform != "linux":
        return torch.zeros(geometry.shape, dtype=geometry.dtype, device=device)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them: everything works, slower
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=geometry.dtype).view(geometry.shape)


class ContiguousKVStore:
    """A KVStore in one tensor, which makes its operations independent of the number of layers.

    Committing, forking and copying take one tensor operation; so does cutting all layers' views for
    a pass.
    """

    def __init__(self, geometry: KVGeometry, device: torch.device) -> None:
        self.geometry = geometry
        self._slots = SlotTable(geometry.num_slots, geometry.capacity, geometry.max_staged_rows)
        self._data = zeros(geometry, device)

    @property
    def device(self) -> torch.device:
        """Where the keys and values are."""
        return self._data.device

    @property
    def num_free(self) -> int:
        """Slots not reserved."""
        return self._slots.num_free

    def reserve(self) -> int:
        """Take a free slot with committed length 0. Raises NotEnoughMemory when none is left."""
        return self._slots.reserve()

    def length(self, slot: int) -> int:
        """Committed tokens in `slot`."""
        return self._slots.length(slot)

    def stage(self, slot: int, start: int, num_rows: int) -> tuple[torch.Tensor, ...]:
        """Announce rows and get the places to write them to.

        Returns:
            Views [1, kv_heads, num_rows, head_dim]: keys of layer l at 2l, values at 2l + 1.

        Raises:
            ValueError: the rows overwrite committed ones or leave a gap.
            NotEnoughMemory: the rows do not fit into the slot.
        """
        self.claim(slot, start, num_rows)
        return self.window(slot, start, start + num_rows)

    def claim(self, slot: int, start: int, num_rows: int) -> None:
        """`stage` for callers that write through `layer`: no views are cut."""
        self._slots.stage(slot, start, num_rows)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, [slots, kv_heads, width, head_dim] each, as views."""
        return self._data[2 * index], self._data[2 * index + 1]

    def window(self, slot: int, start: int, end: int) -> tuple[torch.Tensor, ...]:
        """Rows [start, end) of a slot in every layer, as views laid out like those of `stage`."""
        return self._data[:, slot : slot + 1, :, start:end].unbind(0)

    def commit(self, slot: int, rows: Sequence[int]) -> None:
        """Keep the staged rows `rows`, drop the rest.

        They are ascending offsets from the committed length. No data move when they are a prefix of
        what is staged; otherwise the kept rows move forward.

        Raises:
            ValueError: the rows are not ascending or were never staged.
            NotEnoughMemory: the slot would exceed its capacity.
        """
        start = self._slots.commit(slot, rows)
        num_placed = num_in_place(rows)
        if num_placed == len(rows):
            return
        moved = torch.tensor([start + row for row in rows[num_placed:]], device=self._data.device)
        sequence = self._data[:, slot]
        kept = sequence.index_select(2, moved)
        sequence[:, :, start + num_placed : start + len(rows)] = kept

    def begin(self, wanted: Prefix) -> int:
        """Reserve a slot that holds as many of the first `wanted` tokens as any slot does."""
        return self._slots.begin(wanted, self.fork)

    def keep(self, slot: int, num_tokens: int) -> None:
        """Give `slot` back; while nothing else needs it, `begin` may find its first tokens.

        Raises:
            ValueError: fewer than `num_tokens` are committed.
        """
        self._slots.keep(slot, num_tokens)

    def fork(self, slot: int, num_tokens: int | None = None) -> int:
        """A new slot holding a copy of the first committed tokens of `slot` (None: of all).

        Raises:
            ValueError: fewer are committed.
        """
        length = self._slots.length(slot) if num_tokens is None else num_tokens
        self._slots.check_prefix(slot, length)
        copy = self._slots.reserve()
        self._slots.fill(copy, length)
        self._data[:, copy, :, :length] = self._data[:, slot, :, :length]
        return copy

    def export_prefix(self, slot: int, num_tokens: int) -> KVPrefix:
        """Copy the first `num_tokens` committed tokens out.

        Raises:
            ValueError: fewer are committed.
        """
        self._slots.check_prefix(slot, num_tokens)
        tensor = self._data[:, slot, :, :num_tokens].clone()
        return KVPrefix(num_tokens=num_tokens, tensors=(tensor,))

    def import_prefix(self, slot: int, prefix: KVPrefix) -> None:
        """Fill an empty slot with an exported prefix.

        Raises:
            ValueError: the slot is not empty.
            NotEnoughMemory: the prefix exceeds the capacity.
        """
        self._slots.fill(slot, prefix.num_tokens)
        (tensor,) = prefix.tensors
        self._data[:, slot, :, : prefix.num_tokens] = tensor

    def free(self, slot: int) -> None:
        """Give `slot` back; its contents are gone."""
        self._slots.free(slot)
