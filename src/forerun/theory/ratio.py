"""Discounted ratio of two sums that grow pair by pair, with its standard error."""

from __future__ import annotations

import math


class DiscountedRatio:
    """Estimates sum(y) / sum(x) under exponential weights.

    The error is that of the ratio estimator: the residuals y - ratio x, whose weighted squares are
    kept as moments (Cochran 1977, section 6.4).

    Args:
        memory: weight that a pair keeps after one more.
    """

    __slots__ = ("memory", "num_pairs", "squares", "weight", "x", "xx", "xy", "y", "yy")

    def __init__(self, memory: float) -> None:
        self.memory = memory
        self.num_pairs = 0
        self.weight = self.squares = 0.0
        self.x = self.y = self.xx = self.xy = self.yy = 0.0

    def observe(self, x: float, y: float) -> None:
        """Count one pair."""
        memory = self.memory
        self.num_pairs += 1
        self.weight = self.weight * memory + 1.0
        self.squares = self.squares * memory * memory + 1.0
        self.x = self.x * memory + x
        self.y = self.y * memory + y
        self.xx = self.xx * memory + x * x
        self.xy = self.xy * memory + x * y
        self.yy = self.yy * memory + y * y

    @property
    def ratio(self) -> float:
        """Return sum(y) / sum(x), which needs at least one pair."""
        return self.y / self.x

    @property
    def relative_error(self) -> float:
        """Return the standard error over the ratio; it is infinite below two pairs."""
        if self.num_pairs < 2 or self.y == 0.0:
            return math.inf
        ratio = self.ratio
        left = max(0.0, self.yy - 2.0 * ratio * self.xy + ratio * ratio * self.xx)
        variance = left / self.weight
        equal = self.weight * self.weight / self.squares  # pairs of equal weight that are as good
        return math.sqrt(variance / max(1.0, equal - 1.0)) / (self.y / self.weight)
