"""Chooses the draft vocabulary of a head: the most frequent learned tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from forerun.align.data.sample import Sample
from forerun.errors import InvalidRequest

__all__ = ["drafted_tokens", "token_counts"]

COVERED = 0.995
"""Share of the learned tokens that a vocabulary covers if no size is given."""
MULTIPLE = 128
"""A size that is chosen here is a multiple of it, which products of matrices take well."""
MOST = 32_000


def drafted_tokens(
    samples: Sequence[Sample], vocab_size: int, size: int | None = None
) -> Int64[Tensor, " draft_vocab"]:
    """Return the tokens a head can draft, ascending.

    Tokens that were never learned follow those that were by how often they occur in prompts.

    Args:
        samples: whose learned tokens are counted.
        vocab_size: of the target.
        size: of the reduced vocabulary; None: the smallest multiple of 128 that covers 99.5% of
            the learned tokens, at most 32,000.

    Raises:
        InvalidRequest: the size is larger than the vocabulary of the target.
    """
    if size is not None and size > vocab_size:
        raise InvalidRequest(
            f"draft_vocab_size is {size}, but the target has {vocab_size} tokens; give at most that"
        )
    learned, read = token_counts(samples, vocab_size)
    order = sorted(range(vocab_size), key=lambda token: (-learned[token], -read[token], token))
    if size is None:
        covered = torch.tensor([learned[token] for token in order]).cumsum(0)
        enough = int((covered < COVERED * covered[-1]).sum()) + 1
        size = min(-(-enough // MULTIPLE) * MULTIPLE, MOST, vocab_size)
    return torch.tensor(sorted(order[:size]))


def token_counts(samples: Sequence[Sample], vocab_size: int) -> tuple[list[int], list[int]]:
    """Return how often every token is learned, and how often it occurs in total.

    Args:
        samples: the texts.
        vocab_size: of the target.
    """
    learned = torch.zeros(vocab_size, dtype=torch.int64)
    read = torch.zeros(vocab_size, dtype=torch.int64)
    for sample in samples:
        ids = torch.tensor(sample.token_ids)
        read += torch.bincount(ids, minlength=vocab_size)
        for start, end in sample.spans:
            learned += torch.bincount(ids[start:end], minlength=vocab_size)
    return learned.tolist(), read.tolist()
