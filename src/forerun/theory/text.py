"""Measures of repetition in a text, because repeated text raises the acceptance of any drafter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def ngrams(token_ids: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """Return all n-grams of `size` tokens in order; a shorter text has none."""
    return (tuple(token_ids[i : i + size]) for i in range(len(token_ids) - size + 1))


def distinct_ngram_share(token_ids: Sequence[int], size: int = 4) -> float:
    """Return distinct n-grams over all n-grams: 1 without repetition, near 0 for a loop."""
    grams = [*ngrams(token_ids, size)]
    return len(set(grams)) / len(grams) if grams else 1.0


def first_repeat(token_ids: Sequence[int], size: int = 32) -> int:
    """Return the start of the first n-gram that occurred before, or the length if there is none."""
    seen: set[tuple[int, ...]] = set()
    for start, ngram in enumerate(ngrams(token_ids, size)):
        if ngram in seen:
            return start
        seen.add(ngram)
    return len(token_ids)
