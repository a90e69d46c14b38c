"""Interface of token masks, which restrict the next token given the text before it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool
from torch import Tensor

__all__ = ["TokenMask", "problem_of_allowed"]


@runtime_checkable
class TokenMask(Protocol):
    """A constraint on the next token, such as a grammar, given the tokens so far.

    A sample owns one, which stands where its committed output ends. For every draft node it is
    forked from the node's parent and told the node's token, so each row of a pass is masked by what
    leads to it. A drafter sees the same masks; one that ignores them is only rejected more often.
    The mask itself decides where the text may end: by allowing the end-of-sequence token.
    """

    def fork(self) -> TokenMask:
        """Return an independent copy for a draft node; immutable parts should be shared."""

    def advance(self, token: int) -> None:
        """Advance by one allowed token, which is the end-of-sequence token at most once."""

    def allowed(self) -> Bool[Tensor, " vocab"]:
        """Return True for every token that may come next, at least one.

        Asked once per state and never written to; best on the CPU.
        """


def problem_of_allowed(allowed: object, vocab_size: int) -> str | None:
    """Describe what is wrong with a mask's `allowed` tensor; None if it is valid.

    Args:
        allowed: what `TokenMask.allowed` returned.
        vocab_size: of the target.
    """
    if not isinstance(allowed, Tensor):
        return f"allowed {type(allowed).__name__}, not a boolean tensor"
    if allowed.dtype != torch.bool or allowed.shape != (vocab_size,):
        return (
            f"allowed a tensor of shape {tuple(allowed.shape)} and dtype {allowed.dtype}; it must "
            f"be boolean, of shape ({vocab_size},), padding ids included"
        )
    return None
