"""The test of uniformity against exact values, simulation and what it must not accept."""

from __future__ import annotations

import random

import pytest

from forerun.theory.intervals import ks_distance, ks_p_value, uniformity_p_value


def test_distance_by_hand():
    # Steps to 1/2 at 0.2 and to 1 at 0.9: furthest right after the first, by 0.3, or before the
    # second, by 0.4.
    assert ks_distance([0.9, 0.2]) == pytest.approx(0.4)
    assert ks_distance([0.5]) == 0.5


@pytest.mark.parametrize(
    ("num", "distance", "p_value"),
    # Critical values of the exact law (Miller 1956, table 1).
    [(10, 0.40925, 0.05), (20, 0.35241, 0.01), (50, 0.18845, 0.05), (100, 0.16081, 0.01)],
)
def test_against_exact_critical_values(num, distance, p_value):
    assert ks_p_value(distance, num) == pytest.approx(p_value, rel=0.06)


def test_uniform_numbers_fail_as_often_as_they_should():
    source = random.Random(5)
    found = [uniformity_p_value([source.random() for _ in range(200)]) for _ in range(1000)]
    assert 25 <= sum(p < 0.05 for p in found) <= 75  # 50, three and a half standard deviations
    assert sum(p < 0.5 for p in found) == pytest.approx(500, abs=60)


def test_squares_are_found_out():
    source = random.Random(6)
    assert uniformity_p_value([source.random() ** 2 for _ in range(200)]) < 1e-6


@pytest.mark.parametrize("values", [[], [0.5, 1.1], [-0.1]])
def test_what_is_no_sample_is_refused(values):
    with pytest.raises(ValueError, match="uniformity"):
        uniformity_p_value(values)


def test_no_distance_is_no_evidence():
    assert ks_p_value(0.0, 50) == 1.0
    assert ks_p_value(1.0, 1000) == pytest.approx(0.0, abs=1e-12)
