"""Draft and loss as one torch module, which sharding and replication require."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from forerun.align.data.sample import PackedBatch
from forerun.align.objectives.chunked import (
    DraftHead,
    LearnedRows,
    chunked_acceptance,
    chunked_loss,
)
from forerun.align.objectives.length_aware import length_weights
from forerun.align.objectives.named import Objective
from forerun.align.teachers.base import TeacherRows

__all__ = ["DraftLoss", "DraftRows", "causal_rows"]

DraftRows = Callable[[Any, PackedBatch], tuple[Float[Tensor, "learned hidden"], DraftHead]]
"""How a kind of draft reads a batch: its hidden states at the learned rows, and its output head.
All else in training is the same for every kind of draft."""


def causal_rows(
    model: Any, batch: PackedBatch
) -> tuple[Float[Tensor, "learned hidden"], DraftHead]:
    """Return the learned rows of an ordinary draft model, a decoder of transformers.

    Args:
        model: a causal language model with a linear head, tied or not.
        batch: on the device of the model.
    """
    hidden = model.get_decoder()(
        input_ids=batch.ids, position_ids=batch.positions, use_cache=False
    ).last_hidden_state[batch.predicts]
    output = model.get_output_embeddings()
    return hidden, DraftHead(weight=output.weight, bias=output.bias)


class DraftLoss(nn.Module):
    """Sum of the loss over packed rows, with the logits of one chunk at a time.

    The head is not called but read, inside this module's own forward pass: the root of a sharded
    module holds what its layers do not, so the head's rows are whole while they are needed. That is
    also why this class has no `get_output_embeddings`: Accelerate would shard the head by itself.

    Args:
        model: the draft, of the kind that `read_rows` reads.
        objective: what is minimised.
        temperature: the one the draft is deployed at; decides which acceptance is reported.
        weighed_for: K of the deployment, to weigh rows by their share of the expected accepted
            length; None weighs all alike.
        read_rows: how this kind of draft reads a batch.
    """

    def __init__(
        self,
        model: Any,
        objective: Objective,
        temperature: float,
        weighed_for: int | None = None,
        read_rows: DraftRows = causal_rows,
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.objective = objective
        self.temperature = temperature
        self.weighed_for = weighed_for
        self.read_rows = read_rows
        # Accelerate reads here which layers to shard one by one.
        self._no_split_modules = list(model._no_split_modules or ())

    def forward(
        self, batch: PackedBatch, teacher_rows: TeacherRows | None
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Return loss and acceptance probability, summed over the learned rows of a batch.

        Args:
            batch: on the device of the model.
            teacher_rows: the target's distributions; None for objectives that need no teacher.

        Returns:
            The loss, differentiable, and the acceptance probability (alpha), 0 without a teacher.
        """
        hidden, head = self.read_rows(self.model, batch)
        rows = LearnedRows(hidden=hidden, labels=batch.labels, teacher=teacher_rows)
        if self.weighed_for is not None:
            rows = self._weighed(rows, head, batch, self.weighed_for)
        total = chunked_loss(
            rows,
            head,
            self.objective,
            temperature=self.temperature,
            with_acceptance=teacher_rows is not None,
        )
        alpha = hidden.new_zeros(()) if total.acceptance is None else total.acceptance
        # FSDP2 hangs its hooks on what comes out, which must be no view of something else.
        return total.loss.clone(), alpha

    def _weighed(
        self, rows: LearnedRows, head: DraftHead, batch: PackedBatch, k: int
    ) -> LearnedRows:
        """Weight the rows by their contribution to the expected accepted length."""
        alphas = chunked_acceptance(rows, head, temperature=self.temperature)
        learned = batch.predicts
        weights = length_weights(alphas, batch.samples[learned], batch.positions[learned], k)
        return replace(rows, weights=weights)
