"""Measures of repetition in a text; repetitive text is drafted unusually well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["distinct_ngram_share", "first_repeat", "ngrams"]


def ngrams(token_ids: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """Return all runs of `size` neighbouring tokens, in order; none for a shorter text."""
    return (tuple(token_ids[i : i + size]) for i in range(len(token_ids) - size + 1))


def distinct_ngram_share(token_ids: Sequence[int], size: int = 4) -> float:
    """Distinct n-grams over all n-grams: 1 for text that never repeats, near 0 for a loop.

    Args:
        token_ids: tokens of one completion.
        size: n.

    Returns:
        The share; 1.0 for a text too short to hold an n-gram.
    """
    grams = [*ngrams(token_ids, size)]
    return len(set(grams)) / len(grams) if grams else 1.0


def first_repeat(token_ids: Sequence[int], size: int = 32) -> int:
    """Return the start of the first n-gram that occurred before; the text's length where none does.

    The second occurrence may overlap the first, as it does in a short loop.
    """
    seen: set[tuple[int, ...]] = set()
    for start, ngram in enumerate(ngrams(token_ids, size)):
        if ngram in seen:
            return start
        seen.add(ngram)
    return len(token_ids)
