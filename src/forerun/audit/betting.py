"""Tests that stay valid however often one looks: bets against a hypothesis, and their winnings.

A bet pays 1 + stake * (value - expected - tolerance) per token. If the expectation of every value,
given everything before it, is at most expected + tolerance, the product is a non-negative
supermartingale from 1 on, so it ever reaches 1 / a with probability at most a.

Source: Ville 1939; Waudby-Smith and Ramdas 2024.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float
from numpy import ndarray

_SHARES = np.array([0.001, 0.003, 0.01, 0.03, 0.1, 0.3])[:, None]
"""Of the largest stake that cannot lose everything; the bet is the mean over them."""


class Bet:
    """A bet that values lie above their expectation by more than the tolerance."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self._logs = np.zeros(len(_SHARES))

    def update(self, values: Float[ndarray, " n"], expected: Float[ndarray, " n"]) -> None:
        """Add the values of further tokens, each in [0, 1] or NaN, with their expectations."""
        known = ~np.isnan(values)
        values, allowed = values[known], expected[known] + self.tolerance
        factors = 1.0 + _SHARES / allowed * (values - allowed)
        self._logs += np.log(np.maximum(factors, 1e-12)).sum(axis=1)

    @property
    def log_e(self) -> float:
        """Logarithm of the e-value."""
        return _log_mean_exp(self._logs)


def combined(bets: list[Bet]) -> float:
    """Return the logarithm of the mean of the e-values, which is an e-value itself."""
    return _log_mean_exp(np.array([bet.log_e for bet in bets])) if bets else 0.0


def mean_interval(values: Float[ndarray, " n"], error_rate: float) -> tuple[float, float, float]:
    """Return a mean and the ends of a confidence sequence for it.

    The mean of the conditional expectations lies outside, at any time, with about the error rate
    (asymptotically, in the number of values).

    Source: Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas 2024, equation 4.
    """
    num = len(values)
    if num < 2:
        return 0.0, -1.0, 1.0
    mean, spread = float(values.mean()), float(values.std())
    shape = 1e-3  # narrowest at some ten thousand values
    grown = num * shape + 1.0
    reach = spread * math.sqrt(
        2 * grown / (num * num * shape) * math.log(math.sqrt(grown) / error_rate)
    )
    return mean, max(-1.0, mean - reach), min(1.0, mean + reach)


def _log_mean_exp(logs: Float[ndarray, " n"]) -> float:
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).mean()))
