"""Search for the KV slot that shares the longest prefix with a new sequence.

Keys and values of a token are a function of the tokens up to it, at the same positions. So where
two sequences begin with the same tokens, what one has stored serves the other, exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["MIN_SHARED_TOKENS", "Match", "Prefix", "common_length", "longest_match"]

MIN_SHARED_TOKENS = 16
"""A shorter match is not worth a copy: the rows it saves are nearly free in the pass."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefix:
    """Tokens of a sequence and the scope within which they may be shared.

    Attributes:
        ids: of a sequence from its beginning; may still grow.
        scope: sequences of other scopes never meet it.
    """

    ids: list[int]
    scope: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A slot that shares a prefix with a new sequence, and the length of that prefix."""

    slot: int
    num_tokens: int


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences have in common from the beginning."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def longest_match(
    wanted: Prefix,
    kept: Mapping[int, Prefix],
    shared: Mapping[int, Prefix],
    committed: Mapping[int, int],
) -> Match | None:
    """Find the slot that shares the most tokens with a new sequence.

    The last token of a sequence always has to be fed, for its logits are wanted.

    Args:
        wanted: the sequence to begin.
        kept: what slots without a sequence hold.
        shared: sequences that have a slot.
        committed: how many of their tokens are in it.

    Returns:
        None where no slot of that scope shares `MIN_SHARED_TOKENS` tokens or more.
    """
    best: Match | None = None
    least = MIN_SHARED_TOKENS
    for slot, prefix in (*kept.items(), *shared.items()):
        usable = min(committed.get(slot, len(prefix.ids)), len(wanted.ids) - 1)
        if prefix.scope != wanted.scope or usable < least:
            continue
        length = min(usable, common_length(prefix.ids, wanted.ids))
        if length >= least:
            best, least = Match(slot=slot, num_tokens=length), length + 1
    return best
