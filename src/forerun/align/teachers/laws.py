"""From the target's logits to the law it is deployed with: what a draft is to learn."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.align.law import DenseLaw, SparseLaw, TargetLaw
from forerun.sampling.config import SamplingParams
from forerun.sampling.largest import largest
from forerun.sampling.processors import pack_params, target_probs

__all__ = ["deployed_law"]


def deployed_law(target_logits: Float[Tensor, "rows vocab"], sampling: SamplingParams) -> TargetLaw:
    """The law of rows of logits under the deployed temperature, min_p, top_k and top_p.

    Masks, biases and penalties are left out: the engine applies them to the draft's logits as it
    does to the target's, so a draft need not learn them.

    Args:
        target_logits: of any floating dtype; left as they are.
        sampling: of the deployment.

    Returns:
        At temperature 0 the one most likely token of every row, which is the whole law; else the
        probability of every token. A row whose logits are not finite is NaN.
    """
    if sampling.greedy:
        best, tokens = largest(target_logits)
        shares = torch.ones_like(best, dtype=torch.float32).masked_fill_(
            ~best.isfinite(), torch.nan
        )
        return SparseLaw(ids=tokens[:, None], shares=shares[:, None])
    params = pack_params([sampling], target_logits.device, rows=[0] * len(target_logits))
    return DenseLaw(target_probs=target_probs(target_logits.float(), params))
