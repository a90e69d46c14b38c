"""Whether a share is clearly lower on one side than on another."""

from __future__ import annotations

import math

__all__ = ["MIN_Z", "is_drop"]

MIN_DROP = 0.15
"""A smaller difference explains no complaint."""
MIN_Z = 5.0
"""Steps of one request depend on each other, so this asks for more than independent ones would."""


def is_drop(high: tuple[int, int], low: tuple[int, int], min_z: float = MIN_Z) -> bool | None:
    """Whether the second share is clearly lower than the first; None where that is open.

    Args:
        high: accepted ones and all of them, at least one, on the side that may be higher.
        low: the same of the other side.
        min_z: standard errors that a drop must come to.
    """
    (num_high, of_high), (num_low, of_low) = high, low
    difference = num_high / of_high - num_low / of_low
    both = (num_high + num_low) / (of_high + of_low)
    error = math.sqrt(both * (1 - both) * (1 / of_high + 1 / of_low))
    if difference >= MIN_DROP and difference >= min_z * error:
        return True
    return False if difference + 2 * error < MIN_DROP else None
