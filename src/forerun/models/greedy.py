"""Greedy continuation by one forward pass per token."""

from __future__ import annotations

import torch
from jaxtyping import Int64
from torch import Tensor

from forerun.models.base import LanguageModel, RowBatch, Span

__all__ = ["chain_by_forward"]


def chain_by_forward(
    model: LanguageModel, batch: RowBatch, num_tokens: int, vocab_size: int
) -> Int64[Tensor, "sequences num_tokens"]:
    """`LanguageModel.greedy_chain`, level by level: one pass per token, one row per sequence."""
    levels = [_most_likely(model, batch, vocab_size)]
    positions = batch.positions[batch.logit_rows]
    rows = torch.arange(len(batch.spans), device=batch.tokens.device)
    for depth in range(num_tokens - 1):
        level = RowBatch(
            tokens=levels[-1],
            positions=positions + (depth + 1),
            spans=tuple(
                Span(slot=s.slot, start=s.start + s.num_chain + depth, num_chain=1)
                for s in batch.spans
            ),
            logit_rows=rows,
        )
        levels.append(_most_likely(model, level, vocab_size))
    return torch.stack(levels, dim=1)


def _most_likely(model: LanguageModel, batch: RowBatch, vocab_size: int) -> Tensor:
    return model.forward(batch).logits[:, :vocab_size].argmax(dim=-1)
