"""Medusa heads under training (Medusa-1): head k of row t learns token t + k + 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from forerun.align.methods.base import HeadMethod, PassStates, with_weights
from forerun.align.objectives import DraftHead
from forerun.align.samples import PackedBatch, Sample
from forerun.align.target import read_head
from forerun.align.teachers import StateRows
from forerun.drafters.medusa import MedusaConfig, MedusaHeads, write_medusa


class MedusaMethod(HeadMethod):
    """Heads with the target's output matrix, made fresh."""

    layers: tuple[int, ...] | None = ()
    model: MedusaOverTarget

    def load(self) -> None:
        """There is nothing to begin with."""

    def start(self, samples: Sequence[Sample]) -> None:
        output = read_head(self.target, torch.float32).weight
        heads = MedusaConfig(
            hidden_size=output.shape[1],
            vocab_size=output.shape[0],
            num_heads=self.config.attached.num_passes,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed)  # noqa: TID251 (torch fills biases from it)
            self.model = MedusaOverTarget(MedusaHeads(heads), output)

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        write_medusa(with_weights(self.model.head, weights), folder, target=self.target.name)


class MedusaOverTarget(nn.Module):
    """Medusa heads under training, with the target's frozen output matrix."""

    def __init__(self, head: MedusaHeads, output: Float[Tensor, "vocab hidden"]) -> None:
        super().__init__()
        self.head = head
        self.register_buffer("output", output.detach().float(), persistent=False)

    def forward(
        self,
        batch: PackedBatch,
        rows: StateRows,
        learning: Bool[Tensor, "passes rows width"],
    ) -> PassStates:
        """Run all Medusa heads over the rows that have a loss; see `PassLoss`."""
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
