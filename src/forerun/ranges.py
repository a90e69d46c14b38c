"""Ranges of numeric settings; a value outside is refused with the name of its setting."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forerun.errors import InvalidRequest

__all__ = ["Range", "check_ranges"]


@dataclass(frozen=True, slots=True)
class Range:
    """The values a numeric field may take."""

    name: str
    low: float
    high: float = math.inf
    above_low: bool = False
    integer: bool = False
    optional: bool = False

    def check(self, value: object) -> None:
        """Raise InvalidRequest unless `value` is a finite number in range."""
        if value is None and self.optional:
            return
        kind = int if self.integer else (int, float)
        if isinstance(value, kind) and not isinstance(value, bool) and self._holds(value):
            return
        raise InvalidRequest(f"{self.name} is {value!r}; it must be {self}")

    def _holds(self, value: float) -> bool:
        above = value > self.low if self.above_low else value >= self.low  # false for NaN
        return above and value <= self.high and value < math.inf

    def __str__(self) -> str:
        kind = "an integer" if self.integer else "a number"
        low = f" {'above' if self.above_low else 'at least'} {self.low:g}"
        high = f" and at most {self.high:g}"
        bounds = (low if self.low > -math.inf else "") + (high if self.high < math.inf else "")
        return kind + bounds + (" or None" if self.optional else "")


def check_ranges(config: object, *ranges: Range) -> None:
    """Refuse fields out of range.

    Raises:
        InvalidRequest: naming the first.
    """
    for limits in ranges:
        limits.check(getattr(config, limits.name))
