"""Discounted ratios: the figure, and how well its error covers it."""

from __future__ import annotations

import math
import random

import pytest

from forerun.theory.intervals import DiscountedRatio


def fed(pairs: list[tuple[float, float]], memory: float = 1.0) -> DiscountedRatio:
    ratio = DiscountedRatio(memory)
    for x, y in pairs:
        ratio.observe(x, y)
    return ratio


def test_it_is_the_ratio_of_the_sums():
    assert fed([(1.0, 2.0), (3.0, 3.0)]).ratio == pytest.approx(5 / 4)


def test_old_pairs_weigh_less():
    assert fed([(1.0, 1.0)] * 50 + [(1.0, 3.0)] * 50, memory=0.8).ratio == pytest.approx(
        3, abs=0.01
    )


def test_pairs_of_one_ratio_leave_no_error():
    assert fed([(1.0, 2.0), (2.0, 4.0), (5.0, 10.0)]).relative_error == pytest.approx(0, abs=1e-7)


def test_one_pair_says_nothing_of_the_error():
    assert fed([(1.0, 2.0)]).relative_error == math.inf


def test_the_error_of_two_pairs_is_that_of_the_mean_of_a_sample_of_two():
    # With x = 1 the ratio is the mean 2 of y = 1, 3: sample deviation sqrt(2), error of the mean 1.
    assert fed([(1.0, 1.0), (1.0, 3.0)]).relative_error == pytest.approx(1.0 / 2.0)


@pytest.mark.parametrize("memory", [1.0, 0.98])
def test_the_error_is_how_far_the_ratio_strays(memory):
    generator = random.Random(0)
    found = [
        fed([(generator.gauss(1.0, 0.1), generator.gauss(3.0, 1.0)) for _ in range(300)], memory)
        for _ in range(200)
    ]
    strays = [(ratio.ratio / 3.0 - 1.0) / ratio.relative_error for ratio in found]
    spread = math.sqrt(sum(stray**2 for stray in strays) / len(strays))
    assert spread == pytest.approx(1.0, abs=0.15)
