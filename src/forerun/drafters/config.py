"""Drafters that are chosen by a name instead of a model folder; torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["DRAFTER_NAMES", "DrafterName", "NamedDrafter", "parse_drafter"]

DrafterName = Literal["suffix", "self", "recycling"]
DRAFTER_NAMES: tuple[DrafterName, ...] = get_args(DrafterName)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedDrafter:
    """A drafter in its command-line form: `NAME` or `NAME:ARGUMENT`.

    Attributes:
        name: the drafter.
        argument: the text after the colon, empty without one.
    """

    name: DrafterName
    argument: str = ""


def parse_drafter(text: str) -> NamedDrafter | None:
    """Return the drafter that `text` names; None if `text` is a model folder or model name."""
    head, _, argument = text.partition(":")
    for name in DRAFTER_NAMES:
        if head == name:
            return NamedDrafter(name=name, argument=argument)
    return None
