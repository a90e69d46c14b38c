"""Input buffers of a recorded pass, filled before every replay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.models.base import RowBatch
from forerun.models.runner.graphs.rectangle import NUM_FIELDS, PassShape, table_of

__all__ = ["Inputs", "Rows"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The rows of one rectangle, as its attention needs them.

    Attributes:
        bucket: its shape.
        positions: absolute position per row.
        index: where in its slot each row is written.
        visible: per row, bit j set if it sees the row at its sequence's start + j.
        slot: of each sequence.
        start: first index written, per sequence; all before is seen by all its rows.
        end: index after the last one written, per sequence.
    """

    bucket: PassShape
    positions: Int64[Tensor, "sequences rows"]
    index: Int64[Tensor, "sequences rows"]
    visible: Int64[Tensor, "sequences rows"]
    slot: Int64[Tensor, " sequences"]
    start: Int64[Tensor, " sequences"]
    end: Int64[Tensor, " sequences"]


class Inputs:
    """Input buffers of passes of one shape.

    Args:
        bucket: the shape.
        device: where they lie.
        features: where the pass puts the features of the rectangle's rows; None without.
    """

    def __init__(
        self, bucket: PassShape, device: torch.device, features: Tensor | None = None
    ) -> None:
        self.bucket = bucket
        self.features = features
        num_sequences, num_rows = bucket.num_sequences, bucket.num_rows
        per_row, per_sequence = NUM_FIELDS
        num_padded = num_sequences * num_rows
        size = per_row * num_padded + per_sequence * num_sequences
        self._table = torch.zeros(size, dtype=torch.int64, device=device)
        rows, sequences = self._table.tensor_split((per_row * num_padded,))
        self._place, self._source, index, visible = rows.view(per_row, num_padded)
        slot, start, end, self.original = sequences.view(per_sequence, num_sequences)
        self.tokens = torch.zeros(num_padded, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self.tokens)
        self.wanted = torch.zeros(bucket.num_wanted, dtype=torch.int64, device=device)
        shape = (num_sequences, num_rows)
        self.rows = Rows(
            bucket=bucket,
            positions=self._positions.view(shape),
            index=index.view(shape),
            visible=visible.view(shape),
            slot=slot,
            start=start,
            end=end,
        )

    def packed_features(self, batch: RowBatch) -> Float[Tensor, "rows layers hidden"] | None:
        """A copy of the features of the rows of `batch`, in their order, after a pass."""
        if self.features is None:
            return None
        return self.features.index_select(0, self._place[: len(batch.tokens)])

    def fill(self, batch: RowBatch) -> None:
        """Fill the buffers with `batch` by one copy from the host, without waiting for the device.

        Entries of `wanted` past those of the batch keep an older row of the rectangle.
        """
        # Memory the host may page is staged by the driver before the call returns, so it can go.
        self._table.copy_(torch.tensor(table_of(batch.spans, self.bucket)), non_blocking=True)
        torch.index_select(batch.tokens, 0, self._source, out=self.tokens)
        torch.index_select(batch.positions, 0, self._source, out=self._positions)
        num_wanted = len(batch.logit_rows)
        if num_wanted:
            wanted = self.wanted[:num_wanted]
            torch.index_select(self._place, 0, batch.logit_rows, out=wanted)
