"""Dataclasses from what JSON kept of them, by the types of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = ["built"]

KindT = TypeVar("KindT")


def built(kind: type[KindT], values: Mapping[str, Any]) -> KindT:
    """An instance from its JSON.

    What JSON leaves out has its default, and what is null there may be a field of another version:
    nothing was asked of it.

    Raises:
        KeyError, TypeError, ValueError: these are no values of such an instance.
    """
    assert is_dataclass(kind)
    hints = get_type_hints(kind)
    names = {field.name for field in fields(kind)}
    unknown = {name for name in values.keys() - names if values[name] is not None}
    if unknown:
        raise KeyError(f"unknown: {sorted(unknown)}")
    return kind(**{name: value_of(hints[name], values[name]) for name in values.keys() & names})


def value_of(hint: Any, value: Any) -> Any:
    """A value of JSON in the type of its field."""
    origin, arguments = get_origin(hint), get_args(hint)
    if value is None:
        return value
    if origin in (Union, UnionType):
        some = [argument for argument in arguments if argument is not NoneType]
        return value_of(some[0], value) if len(some) == 1 else value
    if origin is tuple:
        return tuple(value_of(arguments[0], item) for item in value)
    if origin in (dict, Mapping):
        key, item = arguments
        return {key(name): value_of(item, kept) for name, kept in value.items()}
    if is_dataclass(hint) and isinstance(hint, type):
        return built(hint, value)
    return Path(value) if hint is Path else value
