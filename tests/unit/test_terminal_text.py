"""Names from outside cannot move the cursor or change colours."""

from __future__ import annotations

import shlex

import pytest

from forerun.terminal_text import printable, shell_command


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


@pytest.mark.parametrize("word", ["plain", "a b", "$(touch PWNED).bin", "it's;`id`", "é!*~", ""])
def test_words_of_commands_are_quoted(word):
    command = shell_command("forerun info {model} --draft {draft}@4", model=word, draft="x y")
    assert shlex.split(command) == ["forerun", "info", word, "--draft", "x y@4"]


@pytest.mark.parametrize("word", ["--help", "a\nid", "a\rb", "\x1b[2J", "abc\u202edef", "f\udcff"])
def test_words_that_cannot_be_quoted_are_left_out_of_commands(word):
    command = shell_command("forerun info {model} --draft {draft}", model=word, draft="a b")
    assert command.startswith("forerun info MODEL --draft 'a b' (in place of MODEL write")
    assert word not in command
