"""Bets and confidence sequences."""

from __future__ import annotations

import math

import numpy as np
import pytest

from forerun.doctor.audit.ledger import Bet, Moments, mean_interval


@pytest.mark.parametrize("expected", [0.0, 0.01, 0.5, 0.9])
def test_a_bet_wins_nothing_on_average_at_the_edge_of_the_hypothesis(expected):
    mean = expected + 0.002

    def e_value(value: float) -> float:
        bet = Bet(0.002)
        bet.update(np.array([value]), np.array([expected]))
        return math.exp(bet.log_e)

    assert mean * e_value(1.0) + (1 - mean) * e_value(0.0) == pytest.approx(1.0)
    assert e_value(1.0) > 1.0 > e_value(0.0)


def test_a_bet_grows_with_a_deviation_and_ignores_what_is_unknown():
    bet, other = Bet(0.002), Bet(0.002)
    values = np.tile([1.0, 1.0, 0.0], 400)
    bet.update(values, np.full(1200, 0.5))
    other.update(np.append(values, np.nan), np.append(np.full(1200, 0.5), np.nan))
    assert bet.log_e == pytest.approx(other.log_e)
    assert bet.log_e > 20


def test_an_interval_contains_the_mean_at_every_time():
    # A fixed sequence of which every stretch has mean 1/2: a van der Corput sequence.
    moved = Moments()
    for num in range(4000):
        moved.add(np.array([int(f"{num:014b}"[::-1], 2) / (1 << 14)]))
        low, high = mean_interval(moved, 0.05)
        assert low < 0.5 < high
    assert high - low < 0.08


def test_a_rate_that_was_never_seen_is_bounded_by_the_number_of_tokens():
    few, many = Moments(), Moments()
    few.add(np.zeros(100))
    many.add(np.zeros(10_000))
    assert 1e-4 < mean_interval(many, 0.05)[1] < mean_interval(few, 0.05)[1] < 0.05
