from __future__ import annotations

import pytest

from forerun.probe.fit import straight_line
from forerun.theory.cost_line import Reading


def test_two_points_give_the_line_through_them():
    start, slope = straight_line({1: Reading(3.0), 4: Reading(9.0)})
    assert (start.s, slope.s) == pytest.approx((1.0, 2.0))


def test_errors_follow_the_weights_of_the_points():
    start, slope = straight_line({1: Reading(3.0, 0.3), 4: Reading(9.0, 0.3)})
    assert slope.error_s == pytest.approx(0.3 * 2**0.5 / 3)
    assert start.error_s == pytest.approx(0.3 * ((4 / 3) ** 2 + (1 / 3) ** 2) ** 0.5)


def test_more_points_are_fitted_in_least_squares():
    start, slope = straight_line({1: Reading(1.0), 2: Reading(3.0), 3: Reading(2.0)})
    assert (start.s, slope.s) == pytest.approx((1.0, 0.5))


def test_one_point_lies_on_a_line_through_the_origin():
    assert straight_line({4: Reading(8.0, 0.4)}) == (Reading(0.0), Reading(2.0, 0.1))


def test_a_line_that_would_start_below_nothing_goes_through_the_origin():
    start, slope = straight_line({1: Reading(1.0), 2: Reading(3.0)})
    assert start.s == 0.0
    assert slope.s == pytest.approx((1 * 1 + 2 * 3) / 5)


def test_below_nothing_there_is_nothing():
    start, slope = straight_line({1: Reading(-0.2, 0.5), 4: Reading(-0.1, 0.5)})
    assert (start.s, slope.s) == (0.0, 0.0)
    assert start.error_s == 0.5


def test_a_falling_line_is_flat():
    start, slope = straight_line({1: Reading(5.0), 4: Reading(3.0)})
    assert (start.s, slope.s) == pytest.approx((4.0, 0.0))
