"""Training objectives by name, as losses between the draft's and the target's distribution.

A target's distribution covers the whole vocabulary or some token ids. The divergences take the
draft's log-probabilities and the target's probabilities; the latter may be 0 at all tokens but one.
The tests compare their gradients with closed forms in the draft's logits. Below, p is the target's
distribution and q the draft's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
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
    return _mean_log(target_probs) - (target_probs * log_draft).sum(-1)


def negative_log_acceptance(log_draft: Probs, target_probs: Probs) -> PerRow:
    alpha = overlap(log_draft, target_probs)
    return -alpha.clamp(min=torch.finfo(alpha.dtype).tiny).log()


def _mean_log(probs: Probs) -> PerRow:
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
