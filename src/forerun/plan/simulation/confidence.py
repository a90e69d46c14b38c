"""Confidence of a simulated draft before each draw."""

from __future__ import annotations

import math
from collections.abc import Sequence

from forerun.theory.stop_rule import Measure, StopRule

__all__ = ["measured", "stopped_depth"]


def measured(measure: Measure, alpha: float) -> float:
    """Return the value that a stop rule would measure at a position.

    The draft's top probability is taken to be the probability that its token is accepted, and the
    rest of its distribution to be one other token.
    """
    if measure == "top_probability":
        return alpha
    shares = (alpha, 1.0 - alpha)
    return -math.fsum(share * math.log(share) for share in shares if share)


def stopped_depth(rule: StopRule, alphas: Sequence[float], depth: int) -> int:
    """Return how many of `depth` tokens are drafted; the first one always is."""
    for position in range(1, depth):
        if rule.stops(measured(rule.measure, alphas[position])):
            return position
    return depth
