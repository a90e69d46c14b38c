"""The Kolmogorov-Smirnov test of whether numbers from 0 to 1 are uniform."""

from __future__ import annotations

import math
from collections.abc import Sequence


def uniformity_p_value(values: Sequence[float]) -> float:
    """Return the p-value of the Kolmogorov-Smirnov test that independent numbers are uniform.

    Raises:
        ValueError: there are no values, or one is outside [0, 1].
    """
    return ks_p_value(ks_distance(values), len(values))


def ks_distance(values: Sequence[float]) -> float:
    """Return the largest distance between the empirical distribution function and the diagonal."""
    ordered = sorted(values)
    if not ordered or not (ordered[0] >= 0.0 and ordered[-1] <= 1.0):
        raise ValueError("uniformity takes one or more numbers from 0 to 1")
    num = len(ordered)
    return max(max((i + 1) / num - value, value - i / num) for i, value in enumerate(ordered))


def ks_p_value(distance: float, num_values: int) -> float:
    """Return P(D >= distance) of the Kolmogorov-Smirnov statistic of `num_values` numbers.

    This is the limiting distribution at an effective size, which is accurate from four values on.

    Source: Kolmogorov 1933; the effective size: Stephens 1970.
    """
    from scipy.special import kolmogorov  # slow to import, and few commands need it

    root = math.sqrt(num_values)
    return float(kolmogorov((root + 0.12 + 0.11 / root) * distance))
