"""Wishes for speed: what a step may take, and how much longer than expected steps take."""

from __future__ import annotations

import math
from collections import deque

from forerun.control.base import RequestState

__all__ = ["Punctuality", "wish_s"]

QUANTILE = 0.95
NUM_STEPS = 64


def wish_s(state: RequestState) -> float | None:
    """Seconds per token a request should stay below; None without a wish.

    A deadline is met for certain where every token it may still emit comes in time.
    """
    wishes = []
    if state.tpot_target_s is not None:
        wishes.append(state.tpot_target_s)
    if state.time_left_s is not None and state.max_new > 0:
        wishes.append(max(state.time_left_s, 1e-9) / state.max_new)
    return min(wishes, default=None)


class Punctuality:
    """Measured over expected step times, of late."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=NUM_STEPS)

    def observe(self, measured_s: float, expected_s: float) -> None:
        """One step."""
        self._ratios.append(measured_s / expected_s)

    @property
    def p95(self) -> float:
        """What 95 of 100 steps stay below, in expected times; at least 1."""
        if not self._ratios:
            return 1.0
        ranked = sorted(self._ratios)
        return max(1.0, ranked[math.ceil(QUANTILE * len(ranked)) - 1])
