"""Accepted of reached positions, and whether one such share is clearly below another."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["AcceptedShare"]

MIN_POSITIONS = 100
"""Fewer say nothing: neighbouring positions are alike."""
MIN_DROP = 0.15
"""A smaller difference explains no complaint."""
MIN_Z = 5.0
"""Positions of one text depend on each other, so this asks for more than independent ones would."""


@dataclass(slots=True, kw_only=True)
class AcceptedShare:
    """Counts of one kind of text.

    Attributes:
        num_reached: drafted positions whose predecessors were accepted.
        num_accepted: accepted ones among them.
    """

    num_reached: int = 0
    num_accepted: int = 0

    def add(self, num_reached: int, num_accepted: int) -> None:
        """Count more."""
        self.num_reached += num_reached
        self.num_accepted += num_accepted

    @property
    def words(self) -> str:
        """The counts."""
        return f"{self.num_accepted} of {self.num_reached}"

    def is_below(self, other: AcceptedShare) -> bool | None:
        """Whether acceptance is clearly lower here; None where that is open."""
        if min(self.num_reached, other.num_reached) < MIN_POSITIONS:
            return None
        difference = other.num_accepted / other.num_reached - self.num_accepted / self.num_reached
        num_both = self.num_reached + other.num_reached
        both = (self.num_accepted + other.num_accepted) / num_both
        error = math.sqrt(both * (1 - both) * (1 / self.num_reached + 1 / other.num_reached))
        if difference >= MIN_DROP and difference >= MIN_Z * error:
            return True
        return False if difference + 2 * error < MIN_DROP else None
