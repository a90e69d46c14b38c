"""The loss of many rows in chunks, so that only the logits of one chunk exist at a time.

The logits of a whole pass are the largest tensor of training (8,192 rows x 152k tokens are 5 GB in
fp32), and their gradient is as large again. Here the gradients of hidden rows and head are computed
chunk by chunk in the forward pass, and the backward pass only scales them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossSum:
    """Loss summed over rows; the caller divides by the number of rows of all processes.

    Attributes:
        acceptance: sum of alpha under the deployed rule; None if not asked for.
    """

    loss: Float[Tensor, ""]
    acceptance: Float[Tensor, ""] | None
    num_rows: int


def chunked_loss(
    rows: LearnedRows,
    head: DraftHead,
    objective: Objective,
    *,
    temperature: float,
    with_acceptance: bool = False,
) -> LossSum:
    """Return the weighted sum of the objective over rows."""
    if rows.teacher is None and (objective.needs_teacher or with_acceptance):
        raise ValueError(f"{objective.name} and acceptance need a teacher, and there is none")
    asked = _Asked(
        rows=rows,
        objective=objective,
        temperature=temperature,
        with_acceptance=with_acceptance,
        with_gradient=torch.is_grad_enabled(),
        dtype=_product_dtype(rows.hidden),
    )
    loss, acceptance = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]  # torch has no annotations here
        rows.hidden, head.weight, head.bias, asked
    )
    return LossSum(
        loss=loss, acceptance=acceptance if with_acceptance else None, num_rows=len(rows)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Asked:
    """Arguments of a chunked pass for which autograd computes no gradient."""

    rows: LearnedRows
    objective: Objective
    temperature: float
    with_acceptance: bool
    with_gradient: bool
    dtype: torch.dtype


class _ChunkedLoss(torch.autograd.Function):
    """Autograd function whose forward also computes the gradients, which backward scales."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, asked: _Asked
    ) -> tuple[Tensor, Tensor]:
        wanted = [asked.with_gradient and needed for needed in ctx.needs_input_grad[:3]]
        with torch.autocast(hidden.device.type, enabled=False):
            layer = _Layer(hidden, weight, bias, asked.dtype)
            gradients = _Gradients(layer, wanted)
            sums = [_add_chunk(chunk, layer, asked, gradients) for chunk in _chunks(len(hidden))]
        loss, acceptance = torch.stack(sums).sum(0) if sums else hidden.new_zeros(2)
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.dtypes = [None if part is None else part.dtype for part in (hidden, weight, bias)]
        ctx.mark_non_differentiable(acceptance)
        return loss, acceptance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if gradient is None else (gradient * grad_loss).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None


def _add_chunk(chunk: slice, layer: _Layer, asked: _Asked, gradients: _Gradients) -> Tensor:
    """Return loss and acceptance of some rows, summed, and add their gradients."""
    rows = asked.rows
    distribution = None
    if rows.teacher is not None and (asked.objective.needs_teacher or asked.with_acceptance):
        distribution = rows.teacher.distribution(chunk)
    logits = layer.logits(chunk, asked.temperature).requires_grad_(gradients.any_wanted)
    with torch.set_grad_enabled(gradients.any_wanted):
        losses = asked.objective.losses(logits, distribution, rows.labels[chunk])
        loss = losses.sum() if rows.weights is None else losses @ rows.weights[chunk]
    if gradients.any_wanted:
        (of_logits,) = torch.autograd.grad(loss, logits)
        gradients.add(chunk, of_logits, asked.temperature)
    acceptance = loss.new_zeros(())
    if asked.with_acceptance and distribution is not None:
        alphas = acceptance_probability(logits.detach(), distribution, asked.temperature)
        acceptance = alphas.sum()
    return torch.stack([loss.detach(), acceptance])


class _Layer:
    """The output head, converted to the dtype of its matrix products."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        self.hidden = hidden.to(dtype)
        self.weight = weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)

    def logits(self, chunk: slice, temperature: float) -> Tensor:
        """Return fp32 logits (fp64 for fp64 rows), divided by the temperature unless it is 0."""
        logits = F.linear(self.hidden[chunk], self.weight, self.bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if temperature in (0, 1) else logits / temperature


class _Gradients:
    """Gradients of hidden rows, weight and bias that are needed, summed in fp32."""

    def __init__(self, layer: _Layer, wanted: Sequence[bool]) -> None:
        hidden, weight, bias = wanted
        exact = torch.promote_types(layer.weight.dtype, torch.float32)
        self._layer = layer
        self.any_wanted = any(wanted)
        self.hidden = torch.empty_like(layer.hidden) if hidden else None
        self.weight = torch.zeros_like(layer.weight, dtype=exact) if weight else None
        self.bias = layer.weight.new_zeros(len(layer.weight), dtype=exact) if bias else None

    def add(self, chunk: slice, of_logits: Tensor, temperature: float) -> None:
        if temperature not in (0, 1):
            of_logits = of_logits / temperature
        if self.bias is not None:
            self.bias += of_logits.sum(0)
        of_logits = of_logits.to(self._layer.weight.dtype)
        if self.hidden is not None:
            torch.mm(of_logits, self._layer.weight, out=self.hidden[chunk])
        if self.weight is not None:
            self.weight += of_logits.T @ self._layer.hidden[chunk]


def _chunks(num_rows: int) -> Iterator[slice]:
    for first in range(0, num_rows, CHUNK_ROWS):
        yield slice(first, min(first + CHUNK_ROWS, num_rows))


def _product_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype
