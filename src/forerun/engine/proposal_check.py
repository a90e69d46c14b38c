"""What a proposal must be for verification to be possible and exact.

A verifier trusts `draft_probs`: rows that are not the law of the drawn tokens bias the text without
a trace. Not everything a drafter may get wrong can be seen, but what can be is refused here, before
the target pass that all requests share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.errors import DrafterError
from forerun.sampling.choice import Choice
from forerun.sampling.config import SamplingParams, resolve_verification
from forerun.sampling.proposal import Proposal

__all__ = ["check_proposal"]

MASS_TOLERANCE = 1e-4
"""Bounds the bias of rows that are off by a factor: fp32 softmax is far below, bf16 (0.4%) not."""


def check_proposal(
    proposal: Proposal, *, num_speculative_tokens: int, vocab_size: int, params: SamplingParams
) -> None:
    """Refuse a proposal the step could not, or must not, verify.

    Args:
        proposal: what the drafter returned.
        num_speculative_tokens: most nodes it was asked for.
        vocab_size: of the target.
        params: of the request.

    Raises:
        DrafterError: it is malformed.
        InvalidRequest: the verifier the request asks for is not exact for it.
    """
    num_nodes = proposal.num_drafted
    if num_nodes > num_speculative_tokens:
        raise DrafterError(f"{num_nodes} nodes, but K is {num_speculative_tokens}")
    if proposal.tokens.shape != (num_nodes,) or proposal.tokens.dtype != torch.int64:
        raise DrafterError(
            f"{num_nodes} nodes, but tokens of shape {tuple(proposal.tokens.shape)} and dtype "
            f"{proposal.tokens.dtype}; there must be one int64 id per node"
        )
    if proposal.draft_probs is not None:
        check_shape(proposal, proposal.draft_probs, vocab_size)
    if num_nodes == 0:
        return
    resolve_verification(params, proposal.choice, is_chain=proposal.tree.is_chain)
    check_ids(proposal.tokens, vocab_size)
    if proposal.draft_probs is not None:
        check_laws(proposal, proposal.draft_probs)
    elif proposal.choice is Choice.SAMPLED:
        raise DrafterError("a sampled proposal needs the draft_probs it was drawn from")


def check_ids(tokens: Tensor, vocab_size: int) -> None:
    """Refuse ids the target does not have."""
    low, high = (int(token) for token in torch.aminmax(tokens))
    if low < 0 or high >= vocab_size:
        raise DrafterError(f"token id {low if low < 0 else high} is outside 0..{vocab_size - 1}")


def check_shape(proposal: Proposal, draft_probs: Tensor, vocab_size: int) -> None:
    """Refuse rows that are not one per expanded parent, or not over the target's ids."""
    num_rows = len(set(proposal.tree.parents))
    if draft_probs.shape != (num_rows, vocab_size):
        raise DrafterError(
            f"draft_probs of shape {tuple(draft_probs.shape)}; {num_rows} expanded parents and "
            f"{vocab_size} tokens need ({num_rows}, {vocab_size})"
        )


def check_laws(proposal: Proposal, draft_probs: Tensor) -> None:
    """Refuse rows that are no distributions, or from which the tokens cannot have been drawn."""
    excess = float((draft_probs.sum(-1, dtype=torch.float32) - 1).abs().amax())
    if not excess <= MASS_TOLERANCE or float(draft_probs.amin()) < 0:  # NaN is not <= either
        raise DrafterError(
            "draft_probs are no distributions: NaN, negative or not adding up to 1; draw from "
            "softmax rows in fp32 and hand in these"
        )
    if proposal.tree.is_chain:
        drawn = draft_probs.gather(-1, proposal.tokens[:, None])
        if float(drawn.amin()) <= 0:
            raise DrafterError("a token has probability 0 in the draft_probs it was drawn from")
