"""The target's distribution at a row, over the whole vocabulary or over some token ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from forerun.sampling.config import SamplingParams
from forerun.sampling.largest import largest
from forerun.sampling.processors import pack_params, target_probs

__all__ = [
    "DenseDistribution",
    "SparseDistribution",
    "TargetDistribution",
    "acceptance_probability",
    "dense_probs",
    "deployed_distribution",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseDistribution:
    """Probabilities of the whole vocabulary, under the deployed temperature and truncation."""

    target_probs: Float32[Tensor, "rows vocab"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SparseDistribution:
    """Probabilities of some token ids per row: drawn ids, the argmax, or the k most likely.

    Attributes:
        ids: distinct within a row, except at share 0 (padding).
        shares: of each id; sums to 1 except where a truncation dropped mass.
    """

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

    Args:
        target_logits: of any floating dtype; left as they are.
        sampling: of the deployment.

    Returns:
        At temperature 0 the one most likely token of every row, which has all the mass; else the
        probability of every token. A row whose logits are not finite is NaN.
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

    Args:
        draft_logits: already divided by the temperature, where it is not 0.
        distribution: the target's; for drawn ids the sum is biased, see `Objective`.
        temperature: the one the draft is deployed at; 0 is greedy.
    """
    target_probs = dense_probs(distribution, draft_logits.shape[-1])
    if temperature == 0:
        return target_probs.gather(1, draft_logits.argmax(-1, keepdim=True))[:, 0]
    return torch.minimum(draft_logits.softmax(-1), target_probs).sum(-1)
