"""Training objectives by name, and the loss of many rows in chunks.

A target's distribution covers the whole vocabulary or some token ids. The divergences take the
draft's log-probabilities and the target's probabilities; the latter may be 0 at all tokens but one.
The tests compare their gradients with closed forms in the draft's logits. Below, p is the target's
distribution and q the draft's.

The logits of a whole pass are the largest tensor of training (8,192 rows x 152k tokens are 5 GB in
fp32), and their gradient is as large again. So only the logits of one chunk exist at a time: the
gradients of hidden rows and head are computed chunk by chunk in the forward pass, and the backward
pass only scales them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from forerun.sampling.config import SamplingParams
from forerun.sampling.kernels import largest
from forerun.sampling.processors import pack_params, target_probs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseDistribution:
    """Probabilities of the whole vocabulary, under the deployed temperature and truncation."""

    target_probs: Float32[Tensor, "rows vocab"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SparseDistribution:
    """Probabilities of some token ids per row, such as the argmax, and their `shares`."""

    ids: Int64[Tensor, "rows some"]
    shares: Float32[Tensor, "rows some"]


TargetDistribution = DenseDistribution | SparseDistribution


def dense_probs(distribution: TargetDistribution, vocab_size: int) -> Float32[Tensor, "rows vocab"]:
    """Return one probability per vocabulary token; 0 for ids outside a sparse distribution."""
    if isinstance(distribution, DenseDistribution):
        return distribution.target_probs
    empty = distribution.shares.new_zeros(len(distribution.ids), vocab_size)
    return empty.scatter_add_(1, distribution.ids, distribution.shares)


def deployed_distribution(
    target_logits: Float[Tensor, "rows vocab"], sampling: SamplingParams
) -> TargetDistribution:
    """Return the target's distribution under the deployed temperature, min_p, top_k and top_p.

    Masks, biases and penalties are left out: the engine applies them to the draft's logits as it
    does to the target's, so a draft need not learn them.
    """
    if sampling.greedy:
        best, tokens = largest(target_logits)
        shares = torch.ones_like(best, dtype=torch.float32).masked_fill_(
            ~best.isfinite(), torch.nan
        )
        return SparseDistribution(ids=tokens[:, None], shares=shares[:, None])
    params = pack_params([sampling], target_logits.device, rows=[0] * len(target_logits))
    return DenseDistribution(target_probs=target_probs(target_logits.float(), params))


@torch.no_grad()
def acceptance_probability(
    draft_logits: Float[Tensor, "rows vocab"], distribution: TargetDistribution, temperature: float
) -> Float[Tensor, " rows"]:
    """Return the probability that one drafted token is accepted, per row (alpha).

    A greedy draft proposes its most likely token, which is accepted with p(argmax q). A sampled
    one is accepted with sum min(p, q). Truncation of the draft's own distribution is not counted.
    """
    target_probs = dense_probs(distribution, draft_logits.shape[-1])
    if temperature == 0:
        return target_probs.gather(1, draft_logits.argmax(-1, keepdim=True))[:, 0]
    return torch.minimum(draft_logits.softmax(-1), target_probs).sum(-1)


Logits = Float[Tensor, "rows vocab"]
Probs = Float[Tensor, "rows vocab"]
PerRow = Float[Tensor, " rows"]


def overlap(log_draft: Probs, target_probs: Probs) -> PerRow:
    """Return sum min(p, q), the probability that a sampled token is accepted (alpha)."""
    alpha: PerRow = _Overlap.apply(  # type: ignore[no-untyped-call]  # torch has no annotations here
        log_draft, target_probs
    )
    return alpha


def forward_kl(log_draft: Probs, target_probs: Probs) -> PerRow:
    return _compute_mean_log(target_probs) - (target_probs * log_draft).sum(-1)


def negative_log_acceptance(log_draft: Probs, target_probs: Probs) -> PerRow:
    alpha = overlap(log_draft, target_probs)
    return -alpha.clamp(min=torch.finfo(alpha.dtype).tiny).log()


def _compute_mean_log(probs: Probs) -> PerRow:
    return (probs * probs.clamp(min=torch.finfo(probs.dtype).tiny).log()).sum(-1)


class _Overlap(torch.autograd.Function):
    """Autograd function of sum min(p, q): its derivative is q where q < p, else 0.

    Autograd's own derivative of `minimum` is masked, which is five times as slow on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, log_draft: Tensor, target_probs: Tensor) -> Tensor:
        draft_probs = log_draft.exp()
        alpha = torch.minimum(draft_probs, target_probs).sum(-1)
        below = torch.lt(draft_probs, target_probs, out=torch.empty_like(draft_probs))
        ctx.save_for_backward(below.mul_(draft_probs))
        return alpha

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_alpha: Tensor) -> tuple[Tensor, None]:
        (derivative,) = ctx.saved_tensors
        return derivative * grad_alpha[:, None], None


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss per row, differentiable in the draft's logits.

    Attributes:
        divergence: from the draft's log-probabilities and the target's probabilities to a loss;
            None for cross-entropy, -log q(label).
    """

    name: str
    divergence: Callable[[Logits, Probs], PerRow] | None = None

    @property
    def needs_teacher(self) -> bool:
        return self.divergence is not None

    def losses(
        self,
        draft_logits: Logits,
        distribution: TargetDistribution | None,
        labels: Int64[Tensor, " rows"],
    ) -> PerRow:
        """Return the loss of every row."""
        log_draft = draft_logits.log_softmax(-1)
        if self.divergence is None:
            return -log_draft.gather(1, labels[:, None])[:, 0]
        if distribution is None:
            raise ValueError(f"objective {self.name} needs a teacher, and there is none")
        if self.name == "fkl" and isinstance(distribution, SparseDistribution):
            # Forward KL needs the draft's probabilities of the ids of the distribution alone.
            log_draft, target_probs = log_draft.gather(1, distribution.ids), distribution.shares
        else:
            target_probs = dense_probs(distribution, draft_logits.shape[-1])
        return self.divergence(log_draft, target_probs.to(log_draft.dtype))


OBJECTIVES: Mapping[str, Objective] = MappingProxyType(
    {
        "ce": Objective(name="ce"),
        "fkl": Objective(name="fkl", divergence=forward_kl),
        "nla": Objective(name="nla", divergence=negative_log_acceptance),
    }
)
"""Objectives of the settings; `forerun.align.run.align` takes any other one as an argument."""


CHUNK_ROWS = 256


@runtime_checkable
class TeacherRows(Protocol):
    """The target's distribution at the learned rows of one batch, computed in chunks.

    Full-vocabulary rows are large (256 rows x 152k are 156 MB in fp32), so no more than a chunk of
    them is ever asked for at once.
    """

    def distribution(self, rows: slice) -> TargetDistribution:
        """Return the distribution at some rows, under the deployed temperature and truncation."""


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
        dtype = _choose_product_dtype(hidden)
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


def _choose_product_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype
