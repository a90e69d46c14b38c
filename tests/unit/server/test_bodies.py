"""How many values and levels the JSON of a body has, before it is parsed."""

from __future__ import annotations

import json

import pytest

from forerun.server.bodies import MAX_DEPTH, MAX_VALUES, parsed
from forerun.server.errors import InvalidBody

DEEP = "[" * (MAX_DEPTH + 1)


@pytest.mark.parametrize("text", [f'"{DEEP}', f'a"{DEEP}"', f"\\{DEEP}", f'\\"{DEEP}'])
def test_brackets_in_a_text_with_escaped_quotes_are_no_levels(text):
    assert parsed(json.dumps([text]).encode()) == [text]


def test_commas_in_a_text_are_no_values():
    body = [f"{DEEP}{',' * (MAX_VALUES + 1)}"]
    assert parsed(json.dumps(body).encode()) == body


def test_commas_between_values_are_counted():
    with pytest.raises(InvalidBody, match=f"{MAX_VALUES + 1} values; at most {MAX_VALUES}"):
        parsed(json.dumps([1] * (MAX_VALUES + 1)).encode())


@pytest.mark.parametrize("text", ["", "\\", '"', '\\"', '"\\'])
def test_levels_behind_a_text_with_escapes_are_counted(text):
    body = f"[{json.dumps(text)}, {DEEP}{']' * len(DEEP)}]"
    with pytest.raises(InvalidBody, match=f"{len(DEEP) + 1} levels"):
        parsed(body.encode())
