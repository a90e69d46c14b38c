"""Features of the tokens in a KV store, stored with their keys and values.

A drafter that reads features must have them for every committed token, those found in a shared
prefix included. So the store holds them by the same rows as the KV: they are staged after a pass,
move with a commit and are copied with a prefix, and a commit without them is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.errors import NotEnoughMemory
from forerun.models.base import KVPrefix
from forerun.models.memory import available_bytes, readable

__all__ = ["FeatureRows", "check_features", "kept_features"]


class FeatureRows:
    """Features of every row of every slot of a store.

    `num_valid` rows at the beginning of a slot have features; a pass that writes rows again makes
    theirs invalid until they are staged again.

    Args:
        layers: layers whose input is kept.
        shape: slots, rows per slot, width of the residual stream.
        dtype: of the features.
        device: where they are kept.

    Raises:
        NotEnoughMemory: there is no room for them.
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
        self._rows = torch.zeros(
            (num_slots, num_rows, len(layers), width), dtype=dtype, device=device
        )
        self._num_valid = [0] * num_slots

    def invalidate(self, slot: int, start: int) -> None:
        """Mark the features of rows from `start` on as missing."""
        self._num_valid[slot] = min(self._num_valid[slot], start)

    def stage(
        self, slot: int, start: int, num_written: int, features: Float[Tensor, "rows layers width"]
    ) -> None:
        """Store the features of rows `start` and following of a slot with `num_written` rows.

        Raises:
            ValueError: the shape is wrong, or the rows are not written or leave a gap.
        """
        end = start + len(features)
        if features.shape[1:] != self._rows.shape[2:]:
            raise ValueError(
                f"features have the shape {tuple(features.shape[1:])} per row; the store keeps "
                f"{tuple(self._rows.shape[2:])} (layers, width)"
            )
        if not start <= self._num_valid[slot] or end > num_written:
            raise ValueError(
                f"features of rows {start} to {end} of slot {slot} cannot be stored: "
                f"{num_written} rows are written, {self._num_valid[slot]} have features"
            )
        self._rows[slot, start:end] = features
        self._num_valid[slot] = end

    def check_commit(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """Refuse a commit of rows without features.

        Raises:
            ValueError: features of one of the rows, offsets from `start`, were not staged.
        """
        if rows and start + rows[-1] >= self._num_valid[slot]:
            raise ValueError(
                f"row {rows[-1]} of slot {slot} is to be committed without features; the store "
                f"keeps those of layers {self.layers}: call stage_features after every pass"
            )

    def commit(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """Move features of committed rows together; `rows` ascend and are relative to `start`."""
        end = start + len(rows)
        if rows and rows[-1] != len(rows) - 1:
            places = torch.tensor([start + row for row in rows], device=self._rows.device)
            self._rows[slot, start:end] = self._rows[slot].index_select(0, places)
        self._num_valid[slot] = end

    def copy(self, slot: int, other: int, num_tokens: int) -> None:
        """Copy the features of the first tokens of `slot` to an empty slot."""
        self._rows[other, :num_tokens] = self._rows[slot, :num_tokens]
        self._num_valid[other] = num_tokens

    def read(self, slot: int, start: int, stop: int) -> Float[Tensor, "rows layers width"]:
        """A copy of the features of rows [start, stop)."""
        return self._rows[slot, start:stop].clone()

    def fill(self, slot: int, features: Float[Tensor, "rows layers width"]) -> None:
        """Store the features of all tokens of a slot filled at once."""
        self._num_valid[slot] = 0
        self.stage(slot, 0, len(features), features)


def kept_features(features: FeatureRows | None) -> FeatureRows:
    """Return the features of a store, or raise if it keeps none.

    Raises:
        ValueError: it keeps none.
    """
    if features is None:
        raise ValueError("this store keeps no features; call keep_features(layers) first")
    return features


def check_features(prefix: KVPrefix, features: FeatureRows | None) -> None:
    """Refuse a prefix without features for a store that keeps them.

    Raises:
        ValueError: the prefix has none.
    """
    if features is not None and len(prefix.tensors) < 2:
        raise ValueError("the prefix was exported without features, which this store keeps")
