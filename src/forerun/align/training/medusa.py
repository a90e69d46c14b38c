"""Medusa-1: heads trained on a frozen target, head k of row t on token t + k + 2."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from forerun.align.data.sample import PackedBatch
from forerun.align.objectives.chunked import DraftHead
from forerun.align.teachers.features import FeatureTeacherRows
from forerun.align.training.passes import PassStates
from forerun.drafters.medusa.head import MedusaHeads

__all__ = ["MedusaOverTarget"]


class MedusaOverTarget(nn.Module):
    """Medusa heads with the target's frozen output matrix, as they are trained.

    Args:
        head: the heads, in fp32, without output matrices of their own.
        output: the target's output matrix.
    """

    def __init__(self, head: MedusaHeads, output: Float[Tensor, "vocab hidden"]) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("output", output.detach().float(), persistent=False)

    def forward(
        self,
        batch: PackedBatch,
        rows: FeatureTeacherRows,
        learning: Bool[Tensor, "passes rows width"],
    ) -> PassStates:
        """Run all heads over the rows that learn; see `PassLoss`."""
        active = learning.any(0)
        hidden = rows.last.to(torch.float32)[active]
        states = self.head.states(hidden)
        assert isinstance(self.output, Tensor)
        return PassStates(
            hidden=[
                state[of_pass[active]] for state, of_pass in zip(states, learning, strict=True)
            ],
            head=DraftHead(weight=self.output),
        )
