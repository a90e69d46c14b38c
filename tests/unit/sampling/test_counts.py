"""Counts of the tokens that occurred, against counting them anew."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from forerun.sampling.history import FIRST_ROOM, Occurrences, TokenCounts

tokens = st.lists(st.integers(0, 9), max_size=12)


def entries(found: Occurrences) -> dict[tuple[int, int], float]:
    pairs = list(zip(found.rows.tolist(), found.tokens.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs), "a pair of row and token is there once"
    return dict(zip(pairs, found.counts.tolist(), strict=True))


@given(tokens, tokens, st.lists(tokens, min_size=1, max_size=4), st.integers(0, 3))
def test_counts_before_rows(
    prompt: list[int], output: list[int], paths: list[list[int]], first_row: int
) -> None:
    counts = TokenCounts(prompt)
    for token in output:
        counts.add(token)
    expected = {
        (row, token): Counter([*output, *path])[token]
        for row, path in enumerate(paths, first_row)
        for token in {*prompt, *output, *path}
    }
    assert entries(counts.before_rows(first_row, paths)) == expected
    # Reading extends nothing: the path is not part of the output.
    assert dict(zip(counts.tokens.tolist(), counts.counts.tolist(), strict=True)) == {
        token: Counter(output)[token] for token in {*prompt, *output}
    }


def test_more_tokens_than_there_is_room_for_at_first() -> None:
    counts = TokenCounts([7])
    output = [token % 301 for token in range(0, 5 * FIRST_ROOM * 3, 3)]
    for token in output:
        counts.add(token)
    found = dict(zip(counts.tokens.tolist(), counts.counts.tolist(), strict=True))
    assert found == {7: 0} | Counter(output)


def test_memory_is_that_of_what_occurred() -> None:
    counts = TokenCounts([5, 5, 8])
    for token in range(1000, 1200):
        counts.add(token)
    stored = [counts.tokens.untyped_storage().nbytes(), counts.counts.untyped_storage().nbytes()]
    assert sum(stored) <= 12 * 2 * (202 + FIRST_ROOM)
