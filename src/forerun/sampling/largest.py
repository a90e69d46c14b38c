"""Finds the most likely token of every row."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.sampling.kernels import kernels_for

__all__ = ["largest"]

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
