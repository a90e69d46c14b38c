"""Counter-based random numbers: each is a function of its key and position alone.

So every controller meets the same requests and the same texts, and a difference between two results
comes from the controllers.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.theory.splitmix import FACTORS, INCREMENT, MASK, SHIFTS, finalise

__all__ = ["NDFloats", "SimulatedDraw", "key_of", "normals", "uniforms"]

NDFloats = NDArray[np.float64]


class SimulatedDraw(IntEnum):
    """The purpose of a random number; different purposes never share one."""

    ARRIVALS = 1
    BURSTS = 2
    PROMPTS = 3
    OUTPUTS = 4
    ALPHAS = 5
    KINDS = 6
    TEXT = 7


def key_of(*parts: int) -> int:
    """Return a 64-bit key made of several numbers, in order."""
    key = INCREMENT
    for part in parts:
        key = finalise(key + part * INCREMENT)
    return key


def uniforms(key: int, count: int) -> NDFloats:
    """Return `count` numbers in [0, 1) with 53 bits each."""
    counters = np.arange(1, count + 1, dtype=np.uint64)
    bits = counters * np.uint64(INCREMENT) + np.uint64(key & MASK)
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    bits ^= bits >> np.uint64(SHIFTS[-1])
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normals(key: int, count: int) -> NDFloats:
    """Return `count` standard normal numbers, two from every two uniform ones.

    Source: Box and Muller 1958.
    """
    pairs: Any = uniforms(key, 2 * ((count + 1) // 2)).reshape(2, -1)
    radius, angle = np.sqrt(-2.0 * np.log1p(-pairs[0])), 2.0 * np.pi * pairs[1]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
