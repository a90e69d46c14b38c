"""How repetitive a text is: greedy text of a small model loops, and loops flatter every drafter."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["distinct_ngram_share", "first_repeat"]


def distinct_ngram_share(token_ids: Sequence[int], size: int = 4) -> float:
    """Distinct n-grams over all n-grams: 1 for text that never repeats, near 0 for a loop.

    Args:
        token_ids: tokens of one completion.
        size: n.

    Returns:
        The share; 1.0 for a text too short to hold an n-gram.
    """
    ngrams = [tuple(token_ids[i : i + size]) for i in range(len(token_ids) - size + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 1.0


def first_repeat(token_ids: Sequence[int], size: int = 32) -> int:
    """Where the first n-gram starts that occurred before; the whole length where none repeats.

    The second occurrence may overlap the first, as it does in a short loop.
    """
    seen: set[tuple[int, ...]] = set()
    for start in range(len(token_ids) - size + 1):
        ngram = tuple(token_ids[start : start + size])
        if ngram in seen:
            return start
        seen.add(ngram)
    return len(token_ids)
