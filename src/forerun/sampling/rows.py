"""Operations on rows over the full vocabulary, in chunks that bound temporary memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from forerun.sampling.kernels import kernels_for

__all__ = ["RawLogprobs", "largest", "on_host", "raw_logprobs", "row_chunks"]

MAX_ELEMENTS = 1 << 22
"""Elements of one temporary: 32 MiB of int64 or fp64."""


def row_chunks(num_rows: int, width: int, max_elements: int = MAX_ELEMENTS) -> Iterator[slice]:
    """Yield consecutive slices of rows with at most `max_elements` elements each.

    A single row is never split: processors, races and residuals need it whole.
    """
    step = max(1, max_elements // max(width, 1))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def on_host(*columns: Tensor) -> list[list[Any]]:
    """Copy all columns to the host with a single synchronisation; token ids fit fp64."""
    if columns[0].is_cpu:
        return [column.tolist() for column in columns]
    together: list[float] = torch.cat([column.to(torch.float64) for column in columns]).tolist()
    numbers = iter(together)
    return [
        [
            number if column.is_floating_point() else int(number)
            for number in islice(numbers, len(column))
        ]
        for column in columns
    ]


BLOCK = 256


def largest(
    scores: Float[Tensor, "rows vocab"],
) -> tuple[Float[Tensor, " rows"], Int64[Tensor, " rows"]]:
    """Return each row's largest score and lowest token id with it; NaN if the row contains NaN.

    A maximum without its place is many times cheaper on the CPU than one with it. So the row is
    halved, as it were: the first block that holds the maximum, then the first place in that block.
    """
    if kernels := kernels_for(scores):
        return kernels.largest(scores)
    num_rows, vocab_size = scores.shape
    width = math.gcd(vocab_size, BLOCK)
    blocks = scores.reshape(-1, width)
    maxima = blocks.amax(-1).view(num_rows, vocab_size // width)
    best, block = maxima.max(-1)
    first = torch.arange(0, len(blocks), maxima.shape[1], device=scores.device)
    token = blocks.index_select(0, first.add_(block)).argmax(-1).add_(block, alpha=width)
    return best, token


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
