"""Packed rows of several samples, the input of one training pass, and how a decoder reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

__all__ = ["PackedBatch", "packed_inputs"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """Token ids of samples laid one after another in rows of equal width.

    A place sees the earlier places of its own sample only: `positions` start again at 0 with every
    sample, which is how transformers recognises packed rows (no mask is passed).

    Attributes:
        ids: tokens; padding holds any valid id.
        positions: of each token within its sample.
        samples: index of the sample in the data set, -1 at padding.
        predicts: whether the token AFTER a place is learned: these places have a loss, and "learned
            rows" everywhere are these places in row-major order.
    """

    ids: Int64[Tensor, "rows width"]
    positions: Int64[Tensor, "rows width"]
    samples: Int64[Tensor, "rows width"]
    predicts: Bool[Tensor, "rows width"]

    @property
    def labels(self) -> Int64[Tensor, " learned"]:
        """The token that follows each learned place."""
        following = torch.roll(self.ids, -1, dims=1)
        return following[self.predicts]

    def to(self, device: torch.device | str) -> PackedBatch:
        """Copy the batch to another device."""
        return PackedBatch(
            ids=self.ids.to(device),
            positions=self.positions.to(device),
            samples=self.samples.to(device),
            predicts=self.predicts.to(device),
        )


BLIND_TO_POSITIONS = frozenset({"opt"})
"""Model types whose decoders do not recognise packed samples by positions that restart at 0."""


def packed_inputs(batch: PackedBatch, model_type: str) -> dict[str, Any]:
    """Return the arguments of a decoder's forward pass over a batch.

    Most decoders recognise packed rows by their positions, and windows are then counted within
    samples; those that do not are given who sees whom.

    Args:
        batch: on the device of the decoder.
        model_type: of its configuration.
    """
    inputs = {"input_ids": batch.ids, "position_ids": batch.positions, "use_cache": False}
    if model_type in BLIND_TO_POSITIONS:
        inputs["attention_mask"] = seen(batch)
    return inputs


def seen(batch: PackedBatch) -> Bool[Tensor, "rows 1 width width"]:
    """Return the attention mask: a place sees itself and the earlier places of its own sample."""
    texts = (batch.positions == 0).cumsum(-1)
    alike = texts[:, :, None] == texts[:, None, :]
    return alike.tril()[:, None]
