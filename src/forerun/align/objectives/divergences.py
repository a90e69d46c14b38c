"""Divergences between the draft's and the target's distribution, as differentiable losses.

All take the draft's log-probabilities and the target's probabilities; the latter may be 0 at all
tokens but one. The tests compare their gradients with closed forms in the draft's logits. Below, p
is the target's distribution and q the draft's.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = [
    "PROBABILITY_FLOOR",
    "forward_kl",
    "jensen_shannon",
    "likelihood_hybrid",
    "negative_log_acceptance",
    "overlap",
    "reverse_kl",
    "total_variation",
]

Probs = Float[Tensor, "rows vocab"]
PerRow = Float[Tensor, " rows"]

PROBABILITY_FLOOR = 1e-8
"""What reverse KL takes for the target's smaller probabilities: a truncated token costs the draft
18 nats, not infinitely many."""


def overlap(log_draft: Probs, target_probs: Probs) -> PerRow:
    """Return sum min(p, q), the probability that a sampled token is accepted (alpha)."""
    alpha: PerRow = _Overlap.apply(  # type: ignore[no-untyped-call]  # torch has no annotations here
        log_draft, target_probs
    )
    return alpha


def forward_kl(log_draft: Probs, target_probs: Probs) -> PerRow:
    """Return KL(p || q) = sum p log(p / q), large where the draft misses likely tokens."""
    return _mean_log(target_probs) - (target_probs * log_draft).sum(-1)


def reverse_kl(log_draft: Probs, target_probs: Probs) -> PerRow:
    """Return KL(q || p) = sum q log(q / p), with p at least `PROBABILITY_FLOOR`."""
    log_target = target_probs.clamp(min=PROBABILITY_FLOOR).log()
    return (log_draft.exp() * (log_draft - log_target)).sum(-1)


def jensen_shannon(log_draft: Probs, target_probs: Probs, beta: float) -> PerRow:
    """Return beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q."""
    draft_probs = log_draft.exp()
    mixture = beta * target_probs + (1 - beta) * draft_probs
    log_mixture = mixture.clamp(min=torch.finfo(mixture.dtype).tiny).log()
    to_target = _mean_log(target_probs) - (target_probs * log_mixture).sum(-1)
    to_draft = (draft_probs * (log_draft - log_mixture)).sum(-1)
    return beta * to_target + (1 - beta) * to_draft


def total_variation(log_draft: Probs, target_probs: Probs) -> PerRow:
    """Return 1 - alpha: the probability that a drafted token is rejected."""
    return 1 - overlap(log_draft, target_probs)


def negative_log_acceptance(log_draft: Probs, target_probs: Probs) -> PerRow:
    """Return -log alpha, whose gradients are larger than those of TV where acceptance is rare."""
    alpha = overlap(log_draft, target_probs)
    return -alpha.clamp(min=torch.finfo(alpha.dtype).tiny).log()


def likelihood_hybrid(log_draft: Probs, target_probs: Probs, eta: float) -> PerRow:
    """Return w KL(p || q) + (1 - w) TV(p, q) with w = exp(-eta alpha): KL early, TV late.

    The weight is no part of the gradient. LK losses, arXiv 2602.23881.
    """
    alpha = overlap(log_draft, target_probs)
    weight = torch.exp(-eta * alpha.detach())
    return weight * forward_kl(log_draft, target_probs) + (1 - weight) * (1 - alpha)


def _mean_log(probs: Probs) -> PerRow:
    """Return sum p log p, a constant for the draft; `xlogy` takes twice as long."""
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
