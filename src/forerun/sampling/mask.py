"""Constraints that follow the text: which tokens may come next, along every path of a tree."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxtyping import Bool
from torch import Tensor

__all__ = ["TokenMask"]


@runtime_checkable
class TokenMask(Protocol):
    """A constraint on the next token, such as a grammar, given the tokens so far.

    A sample owns one, which stands where its committed output ends. For every draft node it is
    forked from the node's parent and told the node's token, so each row of a pass is masked by what
    leads to it. A drafter sees the same masks; one that ignores them is only rejected more often.
    The mask itself decides where the text may end: by allowing the end-of-sequence token.
    """

    def fork(self) -> TokenMask:
        """An independent copy, made once per draft node: share what does not change."""

    def advance(self, token: int) -> None:
        """Advance by one allowed token; the end-of-sequence token at most once."""

    def allowed(self) -> Bool[Tensor, " vocab"]:
        """Return True for every token that may come next, at least one.

        Asked once per state and never written to; best on the CPU.
        """
