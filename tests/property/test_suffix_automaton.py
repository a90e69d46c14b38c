"""The suffix automaton against searches through the text, and its memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import PACKAGE

from forerun.drafters.suffix import NONE, ROOT, SuffixAutomaton

# Few symbols repeat often; more than 32 suffixes that end at one place take a longer text.
texts = st.integers(1, 4).flatmap(lambda n: st.lists(st.integers(0, n), max_size=30))


def automaton_of(text: Sequence[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    return automaton


def ends(text: Sequence[int], part: Sequence[int]) -> list[int]:
    """Where `part` ends in `text`, ascending."""
    size = len(part)
    return [i for i in range(size, len(text) + 1) if list(text[i - size : i]) == list(part)]


def longest_repeated_suffix(text: Sequence[int]) -> int:
    return next(
        n for n in range(len(text) - 1, -1, -1) if len(ends(text, text[len(text) - n :])) > 1
    )


@given(texts)
def test_the_longest_earlier_match_is_found_after_every_token(text):
    automaton = SuffixAutomaton()
    for end, token in enumerate(text, start=1):
        automaton.append(token)
        assert automaton.length(automaton.repeated) == longest_repeated_suffix(text[:end])


@given(texts, texts)
def test_it_recognises_substrings_and_nothing_else(text, part):
    automaton = automaton_of(text)
    state = ROOT
    for end, token in enumerate(part, start=1):
        state = automaton.follow(state, token)
        assert (state != NONE) == bool(ends(text, part[:end]))
        if state == NONE:
            return


@given(texts)
def test_the_favourite_is_what_followed_most_often_and_last(text):
    automaton = automaton_of(text)
    state = automaton.repeated
    size = automaton.length(state)
    if size == 0:
        return
    followers = [text[end] for end in ends(text, text[len(text) - size :]) if end < len(text)]
    most = max(map(followers.count, followers))
    latest = next(t for t in reversed(followers) if followers.count(t) == most)
    token, share = automaton.favourite(state)
    assert token == latest
    assert share == pytest.approx(most / len(followers))


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ([7] * 4000, 60),
        ([token for other in range(2000) for token in (7, 1000 + other)], 120),
        (list((PACKAGE / "engine" / "engine.py").read_bytes()[:6000]), 200),
        ([(i * i // 7) % 4 for i in range(4000)], 200),
    ],
    ids=["one token", "one token among new ones", "code as bytes", "four tokens"],
)
def test_memory_is_bounded_per_token(text, most):
    tracemalloc.start()
    try:
        automaton = automaton_of(text)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert automaton.length(automaton.last) == len(text)
    assert size / len(text) < most
