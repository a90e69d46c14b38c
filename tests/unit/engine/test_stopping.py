"""Stops as functions of ids and text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.engine.results import Stop, TokenStops, find_stop_string, held_back
from forerun.sampling.config import SamplingParams

EOS = frozenset({0, 9})
STOP = Stop(finish_reason="stop")
LENGTH = Stop(finish_reason="length")


def stops(max_new: int = 10, **params: object) -> TokenStops:
    return TokenStops(SamplingParams(**params), EOS, max_new)


@pytest.mark.parametrize(
    ("params", "token", "num_output", "expected"),
    [
        ({}, 5, 3, None),
        ({}, 0, 3, STOP),
        ({}, 9, 3, STOP),
        ({}, 0, 10, STOP),
        ({}, 5, 10, LENGTH),
        ({"ignore_eos": True}, 0, 3, None),
        ({"ignore_eos": True}, 0, 10, LENGTH),
        ({"stop_token_ids": (5,)}, 5, 3, Stop(finish_reason="stop", stop_reason=5)),
        (
            {"stop_token_ids": (5,), "ignore_eos": True},
            5,
            3,
            Stop(finish_reason="stop", stop_reason=5),
        ),
        ({"min_tokens": 3}, 0, 3, None),
        ({"min_tokens": 3}, 0, 4, STOP),
        ({"min_tokens": 3, "stop_token_ids": (5,)}, 5, 2, None),
    ],
)
def test_stops_by_token(params, token, num_output, expected):
    assert stops(**params).check(token, num_output) == expected


@pytest.mark.parametrize(
    ("text", "start", "stop", "expected"),
    [
        ("one two", 0, ("two",), (4, "two")),
        ("one two", 0, ("three",), None),
        ("one two", 6, ("two",), (4, "two")),
        ("one two", 7, ("two",), None),
        ("one two", 0, ("two", "one"), (0, "one")),
        ("abab", 0, ("ab", "aba"), (0, "aba")),
        ("abab", 3, ("ab",), (2, "ab")),
        ("ab", 0, (), None),
    ],
)
def test_the_earliest_stop_string_that_ends_in_the_new_text(text, start, stop, expected):
    assert find_stop_string(text, start, stop) == expected


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("hello", ("\n\n",), 0),
        ("hello\n", ("\n\n",), 1),
        ("hello", ("lot", "ello!"), 4),
        ("aaa", ("aaaa",), 3),
        ("aa", ("aa",), 1),
        ("", ("a",), 0),
    ],
)
def test_what_may_yet_become_a_stop_string_is_held_back(text, stop, expected):
    assert held_back(text, stop) == expected


letters = st.text("ab", max_size=12)


@given(pieces=st.lists(letters, max_size=8), stop=st.lists(st.text("ab", min_size=1, max_size=4)))
def test_what_was_shown_is_never_cut_and_the_cut_is_the_first_match(pieces, stop):
    """Text arrives in pieces, as tokens do; a reader sees all but what is held back."""
    text, shown, cut = "", 0, None
    for piece in pieces:
        start, text = len(text), text + piece
        found = find_stop_string(text, start, tuple(stop))
        if found is not None:
            cut = found[0]
            break
        shown = max(shown, len(text) - held_back(text, tuple(stop)))
    matches = [text.find(s) for s in stop if s in text]
    assert cut == (min(matches) if matches else None)
    assert cut is None or shown <= cut
