"""The part common to all KV stores: slots with committed and staged rows, and their features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.models.features import FeatureRows, kept_features
from forerun.models.slots import Prefix, SlotTable

__all__ = ["SlotStore"]


class SlotStore(ABC):
    """Base class of KV stores with their slots and features; subclasses store the rows.

    Args:
        num_slots: sequences the store has room for.
        capacity: most tokens a slot may commit.
        max_staged_rows: rows that may be staged past `capacity`.
    """

    def __init__(self, num_slots: int, capacity: int, max_staged_rows: int) -> None:
        self._slots = SlotTable(num_slots, capacity, max_staged_rows)
        self._features: FeatureRows | None = None

    @property
    def num_free(self) -> int:
        """Number of slots that are not reserved."""
        return self._slots.num_free

    def reserve(self) -> int:
        """Take a free slot with committed length 0. Raises NotEnoughMemory when none is left."""
        return self._slots.reserve()

    def length(self, slot: int) -> int:
        """Number of committed tokens in `slot`."""
        return self._slots.length(slot)

    def claim(self, slot: int, start: int, num_rows: int) -> None:
        """Stage rows whose contents the caller writes; SlotTable.stage lists the errors."""
        self._slots.stage(slot, start, num_rows)
        if self._features is not None:
            self._features.invalidate(slot, start)

    @abstractmethod
    def fork(self, slot: int, num_tokens: int | None = None) -> int:
        """Copy the first `num_tokens` (None: all) committed tokens of `slot` into a new slot."""

    def begin(self, wanted: Prefix) -> int:
        """Reserve a slot that already contains the longest stored prefix of `wanted`."""
        slot = self._slots.begin(wanted, self.fork)
        if self._features is not None:
            self._features.invalidate(slot, self._slots.length(slot))
        return slot

    def keep(self, slot: int, num_tokens: int) -> None:
        """Free `slot`, but store its first tokens for `begin` until the memory is needed.

        Raises:
            ValueError: fewer than `num_tokens` are committed.
        """
        self._slots.keep(slot, num_tokens)

    def free(self, slot: int) -> None:
        """Free `slot` and discard its contents."""
        self._slots.free(slot)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers whose features the store holds."""
        return () if self._features is None else self._features.layers

    def stage_features(
        self, slot: int, start: int, features: Float[Tensor, "rows layers width"]
    ) -> None:
        """Store the features of staged rows; see `KVStore`."""
        kept_features(self._features).stage(slot, start, self._slots.num_written(slot), features)

    def features(self, slot: int, start: int, stop: int) -> Float[Tensor, "rows layers width"]:
        """A copy of the features of committed rows [start, stop); see `KVStore`."""
        self._slots.check_prefix(slot, stop)
        return kept_features(self._features).read(slot, start, stop)

    def _commit(self, slot: int, rows: Sequence[int]) -> int:
        """Commit staged rows and their features; return the committed length before this call."""
        if self._features is not None:
            self._features.check_commit(slot, self._slots.length(slot), rows)
        start = self._slots.commit(slot, rows)
        if self._features is not None:
            self._features.commit(slot, start, rows)
        return start

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
