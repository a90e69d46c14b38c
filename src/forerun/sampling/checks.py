"""Checks single sampling parameters (lists, token ids, biases) with errors that name the value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from forerun.errors import InvalidRequest

__all__ = ["MAX_BIAS", "as_bias", "as_tuple", "is_stop", "is_token", "shortened"]

MAX_BIAS = 100.0
"""As in the OpenAI API; it decides against any logits met in practice."""


def is_token(token: object) -> bool:
    """Whether a value has the form of a token id."""
    return isinstance(token, int) and not isinstance(token, bool) and token >= 0


def is_stop(text: object) -> bool:
    """Whether a value has the form of a stop string."""
    return isinstance(text, str) and text != ""


def as_tuple(name: str, values: object) -> tuple[Any, ...]:
    """Convert a list from a caller or from JSON to a tuple without checking its entries.

    Raises:
        InvalidRequest: it is no list.
    """
    if values is None:
        return ()
    if isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping):
        return tuple(values)
    raise InvalidRequest(f"{name} is {values!r}; it must be a list")


def as_bias(bias: object) -> dict[int, float]:
    """Convert a logit bias to token ids and floats in range; JSON keys may be strings.

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
    """Convert a key to a token id; keys from JSON are strings."""
    if isinstance(key, str):
        try:
            return int(key)
        except ValueError:
            return None
    return key if isinstance(key, int) and not isinstance(key, bool) else None


def shortened(values: tuple[Any, ...]) -> str:
    """Return a list as text for a message, cut after eight entries."""
    return (
        repr(values) if len(values) <= 8 else f"{repr(values[:8])[:-1]}, ... {len(values)} in all)"
    )
