"""When to stop drafting: a threshold on the distribution the next node would be drawn from.

The decision is taken before the draw, from the distribution alone, so it cannot depend on what is
drawn; to drop a node for its value would bias the text. The first node is always drafted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Measure", "StopRule"]

Measure = Literal["entropy", "top_probability"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """Ends a draft where the draft model is too uncertain of the next node.

    Attributes:
        measure: "entropy" in nats, or "top_probability", of the distribution the node would be
            drawn from; where the node is greedy, of the distribution at temperature 1.
        threshold: the node is not drafted where its entropy is above this, or its top probability
            below.

    Raises:
        ValueError: the threshold is not one of the measure.
    """

    measure: Measure
    threshold: float

    def __post_init__(self) -> None:
        """Refuse thresholds outside the range of the measure."""
        most = 1.0 if self.measure == "top_probability" else float("inf")
        if not 0.0 <= self.threshold <= most:
            raise ValueError(f"a threshold on {self.measure} of {self.threshold}; at most {most}")

    def stops(self, value: float) -> bool:
        """Return whether a node of this entropy or top probability is not drafted; never at NaN."""
        if self.measure == "entropy":
            return value > self.threshold
        return value < self.threshold
