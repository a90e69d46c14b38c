"""What every reader of log lines is, and the numbers they all parse."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from forerun.diagnose.readers.tally import Tally

__all__ = ["NUMBER", "LineReader", "matched_number", "numbers_in", "positive"]

NUMBER = r"([0-9]{1,15}(?:\.[0-9]{1,15})?(?:[eE][-+]?[0-9]{1,2})?)"
MAX_NUMBERS = 64


@runtime_checkable
class LineReader(Protocol):
    """Knows the lines of one format."""

    @property
    def kind(self) -> str:
        """The format's name."""

    @property
    def tally(self) -> Tally:
        """What its lines added up to."""

    def read(self, line: str) -> bool:
        """Take a line in; False where it is none of this format."""

    def close(self) -> None:
        """All lines were read: conclude what takes all of them."""


def matched_number(pattern: re.Pattern[str], line: str) -> float | None:
    """The first group of a pattern as a number; None where it does not match."""
    found = pattern.search(line)
    return float(found.group(1)) if found else None


def numbers_in(text: str) -> list[float]:
    """Every number in a text, as in "0.897, 0.676"."""
    return [float(value) for value in re.findall(NUMBER, text)[:MAX_NUMBERS]]


def positive(values: Mapping[str, float | None], name: str) -> float | None:
    """A value above 0; None otherwise."""
    value = values.get(name)
    return value if value is not None and value > 0.0 else None
