"""How likely a draft's token is accepted, by the rule it is deployed under."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.align.law import TargetLaw, dense_probs

__all__ = ["acceptance_probability"]


@torch.no_grad()
def acceptance_probability(
    draft_logits: Float[Tensor, "rows vocab"], law: TargetLaw, temperature: float
) -> Float[Tensor, " rows"]:
    """Acceptance of one drafted token at every row (alpha).

    A greedy draft proposes its most likely token, which the target says with p(argmax q). A sampled
    one is accepted with sum min(p, q). Truncation of the draft's own law is left out.

    Args:
        draft_logits: already divided by the temperature, where it is not 0.
        law: the target's; of drawn ids the sum is biased upwards or downwards, see `Objective`.
        temperature: the one the draft is deployed at; 0 is greedy.
    """
    target_probs = dense_probs(law, draft_logits.shape[-1])
    if temperature == 0:
        return target_probs.gather(1, draft_logits.argmax(-1, keepdim=True))[:, 0]
    return torch.minimum(draft_logits.softmax(-1), target_probs).sum(-1)
