"""Wishes for speed: what a step may take, and how much longer than expected steps take."""

from __future__ import annotations

import math
from collections import deque

from forerun.control.base import RequestState

__all__ = ["StepTimeRatios", "tpot_limit_s"]

QUANTILE = 0.95
NUM_STEPS = 64


def tpot_limit_s(state: RequestState) -> float | None:
    """Seconds per token a request should stay below; None without a wish.

    A deadline is met for certain where every token it may still emit comes in time.
    """
    target_s, left_s = state.tpot_target_s, state.time_left_s
    if left_s is None or state.max_new <= 0:
        return target_s
    in_time_s = max(left_s, 1e-9) / state.max_new
    return in_time_s if target_s is None else min(target_s, in_time_s)


class StepTimeRatios:
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
