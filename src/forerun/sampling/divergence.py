"""Distances between next-token laws, row by row."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor
from torch.special import xlogy

__all__ = ["acceptance_probability", "js", "kl", "total_variation"]

Probs = Float[Tensor, "*rows vocab"]
Values = Float[Tensor, "*rows"]


def acceptance_probability(target_probs: Probs, draft_probs: Probs) -> Values:
    """alpha: the sum of min(target, draft) = 1 - TV; what token-level rejection accepts."""
    return target_probs.minimum(draft_probs).sum(-1)


def total_variation(target_probs: Probs, draft_probs: Probs) -> Values:
    """Half the L1 distance, in [0, 1]."""
    return (target_probs - draft_probs).abs().sum(-1) / 2


def kl(target_probs: Probs, draft_probs: Probs) -> Values:
    """KL(target || draft) in nats; infinite where the draft excludes a token of the target."""
    terms: Tensor = xlogy(target_probs, target_probs) - xlogy(target_probs, draft_probs)
    return terms.sum(-1)


def js(target_probs: Probs, draft_probs: Probs) -> Values:
    """Jensen-Shannon divergence in nats, in [0, log 2]."""
    middle = (target_probs + draft_probs) / 2
    return (kl(target_probs, middle) + kl(draft_probs, middle)) / 2
