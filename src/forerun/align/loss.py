"""The loss of many rows in chunks, so that only the logits of one chunk exist at a time.

The logits of a whole pass are the largest tensor of training (8,192 rows x 152k tokens are 5 GB in
fp32), and their gradient is as large again. Here the gradients of hidden rows and head are computed
chunk by chunk in the forward pass, and the backward pass only scales them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from forerun.align.objectives import Objective, acceptance_probability
from forerun.align.teachers import TeacherRows

CHUNK_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftHead:
    """The draft's last layer, from hidden states to logits."""

    weight: Float[Tensor, "vocab hidden"]
    bias: Float[Tensor, " vocab"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LearnedRows:
    """Hidden states, labels and teacher of the learned rows of one pass.

    Attributes:
        teacher: the target's distribution at these rows; None for objectives that need none.
        weights: of each row in the sum; None weighs all 1.
    """

    hidden: Float[Tensor, "rows hidden"]
    labels: Int64[Tensor, " rows"]
    teacher: TeacherRows | None = None
    weights: Float[Tensor, " rows"] | None = None


def chunked_loss(
    rows: LearnedRows, head: DraftHead, objective: Objective, *, temperature: float
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the weighted sum of the objective over rows, and the sum of alpha.

    The caller divides both by the number of rows of all processes. Alpha, the acceptance
    probability under the deployed rule, counts 0 without a teacher.
    """
    if rows.teacher is None and objective.needs_teacher:
        raise ValueError(f"{objective.name} needs a teacher, and there is none")
    found: tuple[Tensor, Tensor] = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]  # torch has no annotations here
        rows.hidden, head.weight, head.bias, torch.is_grad_enabled(), rows, objective, temperature
    )
    return found


class _ChunkedLoss(torch.autograd.Function):
    """Autograd function whose forward also computes the gradients, which backward scales."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        with_gradient: bool,
        *job: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return loss and acceptance; `job` is the rows, the objective and the temperature."""
        parts = [hidden, weight, bias]
        wanted = [with_gradient and needed for needed in ctx.needs_input_grad[:3]]
        dtype = _product_dtype(hidden)
        sums = []
        with torch.autocast(hidden.device.type, enabled=False):
            converted = None if bias is None else bias.to(dtype)
            layer = _Layer(hidden.to(dtype), weight.to(dtype), converted, wanted)
            for first in range(0, len(hidden), CHUNK_ROWS):
                chunk = slice(first, min(first + CHUNK_ROWS, len(hidden)))
                sums.append(_add_chunk(chunk, layer, *job))
        loss, acceptance = torch.stack(sums).sum(0) if sums else hidden.new_zeros(2)
        ctx.save_for_backward(layer.of_hidden, layer.of_weight, layer.of_bias)
        ctx.dtypes = [None if part is None else part.dtype for part in parts]
        ctx.mark_non_differentiable(acceptance)
        return loss, acceptance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if gradient is None else (gradient * grad_loss).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None, None


def _add_chunk(
    chunk: slice, layer: _Layer, rows: LearnedRows, objective: Objective, temperature: float
) -> Tensor:
    """Return loss and acceptance of some rows, summed, and add their gradients."""
    distribution = None if rows.teacher is None else rows.teacher.distribution(chunk)
    logits = layer.logits(chunk)
    if temperature:
        logits = logits / temperature
    logits.requires_grad_(layer.learns)
    with torch.set_grad_enabled(layer.learns):
        losses = objective.losses(logits, distribution, rows.labels[chunk])
        loss = losses.sum() if rows.weights is None else losses @ rows.weights[chunk]
    if layer.learns:
        (of_logits,) = torch.autograd.grad(loss, logits)
        layer.add(chunk, of_logits / temperature if temperature else of_logits)
    acceptance = loss.new_zeros(())
    if distribution is not None:
        acceptance = acceptance_probability(logits.detach(), distribution, temperature).sum()
    return torch.stack([loss.detach(), acceptance])


class _Layer:
    """The output head in the dtype of its products, and its gradients, summed in fp32."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]
    ) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.learns = any(wanted)
        exact = torch.promote_types(weight.dtype, torch.float32)
        self.of_hidden = torch.empty_like(hidden) if wanted[0] else None
        self.of_weight = torch.zeros_like(weight, dtype=exact) if wanted[1] else None
        self.of_bias = weight.new_zeros(len(weight), dtype=exact) if wanted[2] else None

    def logits(self, chunk: slice) -> Tensor:
        """Return fp32 logits (fp64 for fp64 rows)."""
        logits = F.linear(self.hidden[chunk], self.weight, self.bias)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def add(self, chunk: slice, of_logits: Tensor) -> None:
        if self.of_bias is not None:
            self.of_bias += of_logits.sum(0)
        of_logits = of_logits.to(self.weight.dtype)
        if self.of_hidden is not None:
            torch.mm(of_logits, self.weight, out=self.of_hidden[chunk])
        if self.of_weight is not None:
            self.of_weight += of_logits.T @ self.hidden[chunk]


def _product_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype
