"""Features of every row of a KV store, which move with its commits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.errors import NotEnoughMemory
from forerun.models.memory import available_bytes, readable


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
