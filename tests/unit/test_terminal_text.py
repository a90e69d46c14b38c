"""Names from outside cannot move the cursor or change colours."""

from __future__ import annotations

import pytest

from forerun.terminal_text import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain name", "plain name"),
        ("é 中 👩‍💻 ─", "é 中 👩‍💻 ─"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("a\rb\nc\td\x07", "a\\rb\\nc\\td\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("abc\u202edef", "abc\\u202edef"),
        ("file\udcff", "file\\udcff"),
        ("\u2028", "\\u2028"),
    ],
)
def test_unsafe_characters_are_shown(text, shown):
    assert printable(text) == shown


def test_lines_can_be_kept():
    assert printable("a\nb\r", keep="\n") == "a\nb\\r"


def test_long_text_is_cut():
    assert printable("x" * 100, max_length=10) == "x" * 9 + "…"
    assert printable("\x1b" * 10, max_length=10) == "\\x1b\\x1b\\…"
    assert printable(12, max_length=2) == "12"
