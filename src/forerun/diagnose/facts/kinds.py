"""What a fact may be: its type, its unit, and the one definition it has here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FactKind", "Type", "flag", "number", "numbers", "word", "words"]

Type = Literal["number", "numbers", "flag", "word", "words"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FactKind:
    """One name that evidence can have.

    Attributes:
        name: how files, flags and rules call it.
        type: number, list of numbers, yes or no, word, or list of words.
        definition: what it is, in one sentence; readers convert whatever an engine means instead.
        unit: of numbers; empty for shares, counts and ratios.
        low: least value that makes sense.
        high: largest value that makes sense; None where there is none.
        choices: words that are understood; empty where any are.
    """

    name: str
    type: Type
    definition: str
    unit: str = ""
    low: float = 0.0
    high: float | None = None
    choices: tuple[str, ...] = ()


def number(
    name: str, definition: str, unit: str = "", high: float | None = None, low: float = 0.0
) -> FactKind:
    """A number of `low` or more."""
    return FactKind(name=name, type="number", definition=definition, unit=unit, low=low, high=high)


def numbers(name: str, definition: str, unit: str = "", high: float | None = None) -> FactKind:
    """A list of numbers of 0 or more."""
    return FactKind(name=name, type="numbers", definition=definition, unit=unit, high=high)


def flag(name: str, definition: str) -> FactKind:
    """Yes or no; what nobody looked at is neither."""
    return FactKind(name=name, type="flag", definition=definition)


def word(name: str, definition: str, *choices: str) -> FactKind:
    """One word."""
    return FactKind(name=name, type="word", definition=definition, choices=choices)


def words(name: str, definition: str, *choices: str) -> FactKind:
    """Several words."""
    return FactKind(name=name, type="words", definition=definition, choices=choices)
