"""Accepted of reached positions, and whether one such share is clearly below another."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.diagnose.drops import is_drop

__all__ = ["Hits"]

MIN_POSITIONS = 100
"""Fewer say nothing: neighbouring positions are alike."""


@dataclass(slots=True, kw_only=True)
class Hits:
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

    def is_below(self, other: Hits) -> bool | None:
        """Whether acceptance is clearly lower here; None where too few positions tell."""
        if min(self.num_reached, other.num_reached) < MIN_POSITIONS:
            return None
        high, low = ((hits.num_accepted, hits.num_reached) for hits in (other, self))
        return is_drop(high, low)
