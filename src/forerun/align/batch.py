"""Packed rows of several samples: what one training pass reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

__all__ = ["Batch"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Samples laid end to end in rows of one width.

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
        """The learned tokens, one per learned row."""
        following = torch.roll(self.ids, -1, dims=1)
        return following[self.predicts]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        return Batch(
            ids=self.ids.to(device),
            positions=self.positions.to(device),
            samples=self.samples.to(device),
            predicts=self.predicts.to(device),
        )
