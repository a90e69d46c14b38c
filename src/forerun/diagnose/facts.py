"""The vocabulary of facts: every name with its definition, type, unit and range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from forerun.diagnose.tables import load_table

__all__ = ["FACTS", "GROUPS", "FactKind", "current_name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FactKind:
    """The definition of one fact.

    Attributes:
        name: how files, flags and causes call it.
        type: number, list of numbers, yes or no, word, or list of words.
        definition: what it is; readers convert figures that an engine defines otherwise.
        unit: of numbers; empty for shares, counts and ratios.
        low: least value that makes sense.
        high: largest value that makes sense; None where there is none.
        choices: words that are understood; empty where any are.
    """

    name: str
    type: Literal["number", "numbers", "flag", "word", "words"]
    definition: str
    unit: str = ""
    low: float = 0.0
    high: float | None = None
    choices: tuple[str, ...] = ()


GROUPS: Mapping[str, tuple[FactKind, ...]] = {
    group: tuple(msgspec.convert({"name": n, **entry}, FactKind) for n, entry in entries.items())
    for group, entries in load_table("facts").items()
}
FACTS: Mapping[str, FactKind] = {kind.name: kind for group in GROUPS.values() for kind in group}
FORMER_NAMES: Mapping[str, str] = {
    former: name
    for group in load_table("facts").values()
    for name, entry in group.items()
    for former in entry.get("former", ())
}
"""Names in facts files of earlier versions."""


def current_name(name: str) -> str:
    """Return the present name of a fact that was renamed."""
    return FORMER_NAMES.get(name, name)
