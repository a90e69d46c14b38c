"""Stop rule of drafting: a threshold on the distribution of the next draft token.

The decision is taken before the draw, from the distribution alone, so it cannot depend on what is
drawn; to drop a node for its value would bias the text. The first node is always drafted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Measure = Literal["entropy", "top_probability"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """Ends a draft when the draft model is too uncertain of the next token.

    Attributes:
        measure: "entropy" in nats, or "top_probability", of the distribution the node would be
            drawn from; where the node is greedy, of the distribution at temperature 1.
        threshold: the node is not drafted where its entropy is above this, or its top probability
            below.
    """

    measure: Measure
    threshold: float

    def __post_init__(self) -> None:
        most = 1.0 if self.measure == "top_probability" else float("inf")
        if not 0.0 <= self.threshold <= most:
            raise ValueError(f"a threshold on {self.measure} of {self.threshold}; at most {most}")

    def stops(self, value: float) -> bool:
        """Return whether the draft ends before a node with this value; NaN never ends it."""
        if self.measure == "entropy":
            return value > self.threshold
        return value < self.threshold
