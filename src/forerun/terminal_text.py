"""Escapes unsafe characters in untrusted text, and quotes it in commands, before it is printed."""

from __future__ import annotations

import shlex
import unicodedata

ESCAPED = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that move the cursor, reorder text, or have no glyph."""
JOINERS = frozenset("\u200c\u200d")
"""Format characters that scripts and emoji need; they change no other character's place."""


def printable(text: object, *, max_length: int | None = None, keep: str = "") -> str:
    r"""Return text in which control and other unsafe characters are escaped.

    Control characters, escape sequences, bidirectional overrides and undecodable bytes of file
    names are shown as `\x1b` or `\u202e`. A text longer than `max_length` ends in an ellipsis.
    `keep` names control characters to keep, such as "\n" where several lines are wanted.
    """
    source = str(text)
    if max_length is not None:
        source = source[: max_length + 1]  # escaping only makes it longer
    shown = source if source.isascii() and source.isprintable() else escaped(source, keep)
    if max_length is not None and len(shown) > max_length:
        shown = shown[: max(0, max_length - 1)] + "…"
    return shown


def write_count(number: int, noun: str) -> str:
    """Return a number and a noun, which has its plural where the number is not 1."""
    return f"{number} {noun}" + "s" * (number != 1)


def shell_command(pattern: str, **words: object) -> str:
    """Return a command in which every word is quoted, so that a shell runs nothing else.

    No quotes help where a word begins with a hyphen or holds characters that `printable` escapes:
    its name in capitals stands in its place, and a remark behind the command says so.
    """
    unsafe = [
        n for n, word in words.items() if str(word)[:1] == "-" or printable(word) != str(word)
    ]
    command = pattern.format_map(
        {n: n.upper() if n in unsafe else shlex.quote(str(word)) for n, word in words.items()}
    )
    if not unsafe:
        return command
    return (
        f"{command} (in place of {' and '.join(unsafe).upper()} write another name: this one "
        "begins with a hyphen or holds control characters, so rename it first)"
    )


def escaped(text: str, keep: str) -> str:
    """Return text with every unsafe character as a Python escape."""
    return "".join(
        character
        if character in keep
        or character in JOINERS
        or unicodedata.category(character) not in ESCAPED
        else character.encode("unicode_escape", "surrogatepass").decode("ascii")
        for character in text
    )
