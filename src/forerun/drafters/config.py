"""Drafters that go by a name instead of a model folder; torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["DRAFTER_NAMES", "DrafterName", "NamedDrafter", "parse_drafter"]

DrafterName = Literal["suffix", "self"]
DRAFTER_NAMES: tuple[DrafterName, ...] = get_args(DrafterName)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedDrafter:
    """A drafter as a shell says it: `NAME` or `NAME:ARGUMENT`.

    Attributes:
        name: which drafter.
        argument: what is behind the colon, empty without one.
    """

    name: DrafterName
    argument: str = ""


def parse_drafter(text: str) -> NamedDrafter | None:
    """The drafter meant by `text`; None where it is a model's folder or name."""
    head, _, argument = text.partition(":")
    for name in DRAFTER_NAMES:
        if head == name:
            return NamedDrafter(name=name, argument=argument)
    return None
