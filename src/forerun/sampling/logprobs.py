"""Log-probabilities of the model before any sampling parameter is applied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from forerun.sampling.chunks import row_chunks

__all__ = ["RawLogprobs", "raw_logprobs"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawLogprobs:
    """Natural-log probabilities of chosen tokens and of the most likely ones.

    Attributes:
        token_logprobs: of the chosen token of each row.
        top_tokens: the most likely tokens, best first.
        top_logprobs: theirs.
    """

    token_logprobs: Float32[Tensor, " rows"]
    top_tokens: Int64[Tensor, "rows top"]
    top_logprobs: Float32[Tensor, "rows top"]


def raw_logprobs(
    logits: Float[Tensor, "rows vocab"], tokens: Int64[Tensor, " rows"], top_n: int
) -> RawLogprobs:
    """Return log-probabilities under the softmax of `logits`, in fp32.

    Args:
        logits: rows the tokens were drawn from, as the model gave them.
        tokens: chosen token of each row.
        top_n: how many of the most likely tokens to return (at most the vocabulary).
    """
    num_rows, vocab_size = logits.shape
    top_n = min(top_n, vocab_size)
    chosen = torch.empty(num_rows, device=logits.device)
    top_tokens = torch.empty(num_rows, top_n, dtype=torch.int64, device=logits.device)
    top = torch.empty(num_rows, top_n, device=logits.device)
    for rows in row_chunks(num_rows, vocab_size):
        logprobs = logits[rows].to(torch.float32).log_softmax(-1)
        chosen[rows] = logprobs.gather(-1, tokens[rows, None])[:, 0]
        top[rows], top_tokens[rows] = logprobs.topk(top_n, dim=-1)
    return RawLogprobs(token_logprobs=chosen, top_tokens=top_tokens, top_logprobs=top)
