"""Whether a value is what a parameter may be: ranges, lists, biases, named where it is not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from forerun.errors import InvalidRequest

__all__ = [
    "MAX_BIAS",
    "Range",
    "as_bias",
    "as_tuple",
    "check_ranges",
    "is_stop",
    "is_token",
    "shortened",
]

MAX_BIAS = 100.0
"""As in the OpenAI API; it decides against any logits met in practice."""


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


def is_token(token: object) -> bool:
    """Whether it could be a token id."""
    return isinstance(token, int) and not isinstance(token, bool) and token >= 0


def is_stop(text: object) -> bool:
    """Whether it could be a stop string."""
    return isinstance(text, str) and text != ""


def as_tuple(name: str, values: object) -> tuple[Any, ...]:
    """What JSON or a caller gave for a list; its entries are checked elsewhere.

    Raises:
        InvalidRequest: it is no list.
    """
    if values is None:
        return ()
    if isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping):
        return tuple(values)
    raise InvalidRequest(f"{name} is {values!r}; it must be a list")


def as_bias(bias: object) -> dict[int, float]:
    """Ids and floats in range, whatever JSON made of the keys.

    Raises:
        InvalidRequest: a key is no id or comes twice, or a number is out of range.
    """
    if not isinstance(bias, Mapping):
        raise InvalidRequest(f"logit_bias is {bias!r}; it must map token ids to numbers")
    converted: dict[int, float] = {}
    for key, number in bias.items():
        token = as_token(key)
        if token is None or not isinstance(number, int | float) or isinstance(number, bool):
            raise InvalidRequest(
                f"logit_bias[{key!r}] is {number!r}; it must map token ids to numbers"
            )
        if token in converted:
            raise InvalidRequest(f"logit_bias names token {token} twice; give one number for it")
        if not abs(number) <= MAX_BIAS:  # NaN is not
            raise InvalidRequest(
                f"logit_bias[{token}] is {number}; it must be from {-MAX_BIAS:g} to {MAX_BIAS:g} "
                "(to forbid a token, name it in bad_token_ids)"
            )
        converted[token] = float(number)
    return converted


def as_token(key: object) -> int | None:
    """The id a key stands for; JSON knows only text for keys."""
    if isinstance(key, str):
        try:
            return int(key)
        except ValueError:
            return None
    return key if isinstance(key, int) and not isinstance(key, bool) else None


def shortened(values: tuple[Any, ...]) -> str:
    """A list for a message, which no reader wants by the thousand."""
    return (
        repr(values) if len(values) <= 8 else f"{repr(values[:8])[:-1]}, ... {len(values)} in all)"
    )
