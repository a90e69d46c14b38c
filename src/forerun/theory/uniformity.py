"""Whether numbers from 0 to 1 are uniform: the test of Kolmogorov and Smirnov."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["ks_distance", "ks_p_value", "uniformity_p_value"]

NUM_TERMS = 100
"""Of a series whose terms fall like exp(-2 j^2 x^2); below x = 0.2 its value is 1 to 1e-12."""


def uniformity_p_value(values: Sequence[float]) -> float:
    """Probability that independent uniform numbers are as far from uniform as these, or further.

    Raises:
        ValueError: there are none, or one is outside [0, 1].
    """
    return ks_p_value(ks_distance(values), len(values))


def ks_distance(values: Sequence[float]) -> float:
    """Largest distance between the empirical distribution function and the diagonal.

    Raises:
        ValueError: there are no values, or one is outside [0, 1].
    """
    ordered = sorted(values)
    if not ordered or not (ordered[0] >= 0.0 and ordered[-1] <= 1.0):
        raise ValueError("uniformity takes one or more numbers from 0 to 1")
    num = len(ordered)
    return max(max((i + 1) / num - value, value - i / num) for i, value in enumerate(ordered))


def ks_p_value(distance: float, num_values: int) -> float:
    """P(D >= distance) for so many independent uniform numbers.

    The limiting distribution at an effective size that makes it good from four values on.

    Source: Kolmogorov 1933; the effective size: Stephens 1970.
    """
    root = math.sqrt(num_values)
    x = (root + 0.12 + 0.11 / root) * distance
    if x < 0.2:
        return 1.0
    terms = ((-1.0) ** (j - 1) * math.exp(-2.0 * (j * x) ** 2) for j in range(1, NUM_TERMS + 1))
    return min(1.0, max(0.0, 2.0 * math.fsum(terms)))
