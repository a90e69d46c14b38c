from __future__ import annotations

import math

import pytest

from forerun.theory.intervals import (
    Interval,
    bootstrap,
    bootstrap_mean,
    bootstrap_ratio,
    divide,
    median_interval,
    normal_interval,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [  # the score test inverted: the roots of (p - share)^2 = z^2 p (1 - p) / n
        (8, 10, 0.4901625, 0.9433178),
        (0, 10, 0.0, 0.2775328),
        (10, 10, 0.7224672, 1.0),
        (35, 100, 0.2636425, 0.4474556),
        (1, 1, 0.2065493, 1.0),
    ],
)
def test_wilson_interval(successes, trials, low, high):
    interval = wilson_interval(successes, trials)
    assert interval.estimate == successes / trials
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-6)


@pytest.mark.parametrize(
    ("confidence", "z"), [(0.5, 0.6744898), (0.95, 1.9599640), (0.999, 3.2905267)]
)
def test_wilson_ends_solve_the_score_equation(confidence, z):
    interval = wilson_interval(13, 40, confidence)
    for p in (interval.low, interval.high):
        assert (p - 13 / 40) ** 2 == pytest.approx(z * z * p * (1 - p) / 40, rel=1e-6)


def test_bootstrap_mean_matches_the_central_limit():
    values = [float(i % 10) for i in range(400)]  # mean 4.5, standard error 2.8723 / 20
    interval = bootstrap_mean(values, seed=1)
    assert interval.estimate == pytest.approx(4.5)
    assert interval.low == pytest.approx(4.5 - 1.96 * 0.14361, abs=0.03)
    assert interval.high == pytest.approx(4.5 + 1.96 * 0.14361, abs=0.03)


def test_pairing_removes_what_blocks_share():
    """Blocks differ twentyfold, the ratio within each is 2 to one percent."""
    below = [1.0 + 19.0 * ((7 * i) % 40) / 40 for i in range(40)]
    above = [2.0 * b * (1.01 if i % 2 else 0.99) for i, b in enumerate(below)]
    paired = bootstrap_ratio(above, below, seed=5)
    shuffled = bootstrap_ratio(above[20:] + above[:20], below, seed=5)
    assert paired.high - paired.low < 0.02
    assert shuffled.high - shuffled.low > 0.2
    assert paired.low < 2.0 < paired.high


def test_the_estimate_is_a_ratio_of_sums():
    assert bootstrap_ratio([1.0, 9.0], [1.0, 3.0], seed=0).estimate == pytest.approx(2.5)


def test_an_interval_is_a_function_of_its_seed():
    values = [0.3, 1.7, 2.2, 9.1, 4.4]
    assert bootstrap_mean(values, seed=3) == bootstrap_mean(values, seed=3)
    assert bootstrap_mean(values, seed=3) != bootstrap_mean(values, seed=4)
    assert bootstrap_mean(values, seed=-3) != bootstrap_mean(values, seed=3)


@pytest.mark.parametrize("num_blocks", [2, 3, 7])
def test_every_resample_of_few_blocks_occurs(num_blocks):
    """The extreme resamples, one block throughout, are the ends of a near-certain interval."""
    values = [float(2**i) for i in range(num_blocks)]
    interval = bootstrap_mean(values, seed=11, confidence=1 - 1e-9, num_resamples=20_000)
    assert interval.low == pytest.approx(values[0], rel=0.7)
    assert interval.high == pytest.approx(values[-1], rel=0.3)


def test_a_constant_has_no_spread():
    interval = bootstrap_mean([2.5] * 6, seed=0)
    assert (interval.low, interval.high) == pytest.approx((2.5, 2.5))


def test_straddling_is_neither_above_nor_below():
    interval = Interval(estimate=1.1, low=0.9, high=1.3)
    assert not interval.is_above(1.0)
    assert not interval.is_below(1.0)
    assert interval.is_above(0.8)
    assert interval.is_below(1.4)
    assert not interval.is_above(0.9)


def test_groups_are_resampled_each_within_itself():
    drawn = []

    def statistic(groups):
        drawn.append(groups)
        return sum(groups[0]) / len(groups[0])

    found = bootstrap(statistic, [4, 0, 4], seed=7, num_resamples=50)
    assert found.low < found.estimate == 1.5 < found.high
    assert all([*map(len, groups)] == [4, 0, 4] for groups in drawn)
    assert {i for groups in drawn for i in groups[2]} == {0, 1, 2, 3}
    assert any(groups[0] != groups[2] for groups in drawn[:50])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: wilson_interval(0, 0), "0 successes of 0"),
        (lambda: wilson_interval(3, 2), "3 successes of 2"),
        (lambda: wilson_interval(1, 2, confidence=95.0), "confidence is 95.0"),
        (lambda: bootstrap_mean([], seed=0), "at least two"),
        (lambda: bootstrap_mean([1.0], seed=0), "at least two"),
        (lambda: bootstrap_mean([1.0, float("nan")], seed=0), "block 1 is nan"),
        (lambda: bootstrap_mean([1.0, 2.0], seed=0, confidence=1.0), "confidence is 1.0"),
        (lambda: bootstrap_ratio([1.0, 2.0], [1.0], seed=0), "2 numerators and 1"),
        (lambda: bootstrap_ratio([1.0, 2.0], [1.0, 0.0], seed=0), "block 1 is 2.0 / 0.0"),
    ],
)
def test_impossible_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_normal_interval_ends_two_errors_away_or_where_nothing_can_be():
    found = normal_interval(2.0, 0.5)
    expected = (2.0 - 1.959964 / 2, 2.0, 2.0 + 1.959964 / 2)
    assert (found.low, found.estimate, found.high) == pytest.approx(expected)
    assert normal_interval(0.5, 0.5).low == 0.0
    within = normal_interval(1.5, 0.5, least=1.0, most=2.0)
    assert (within.low, within.high) == (1.0, 2.0)


def test_median_interval_is_between_order_statistics():
    # Of ten values, ranks 2 and 9 cover with probability 1 - 2 * 11 / 1024 = 0.979.
    found = median_interval([10, 1, 9, 2, 8, 3, 7, 4, 6, 5])
    assert (found.low, found.estimate, found.high) == (2, 5.5, 9)


@pytest.mark.parametrize("num_values", [6, 7, 15, 40, 1500])
def test_median_interval_covers_and_one_rank_less_would_not(num_values):
    ordered = list(range(num_values))
    rank = round(median_interval(ordered).low)

    def coverage(rank):
        below = sum(math.comb(num_values, i) for i in range(rank + 1))
        return 1 - 2 * below / 2**num_values

    assert coverage(rank) >= 0.95
    assert coverage(rank + 1) < 0.95


@pytest.mark.parametrize("values", [[3.0], [3.0, 1.0, 2.0]])
def test_median_of_few_values_has_their_range(values):
    found = median_interval(values)
    assert (found.low, found.high) == (min(values), max(values))


@pytest.mark.parametrize("values", [[], [1.0, float("nan")]])
def test_median_of_nothing_or_nan_is_refused(values):
    with pytest.raises(ValueError, match="median"):
        median_interval(values)


def test_relative_errors_of_a_ratio_add_up_in_quadrature():
    tau = Interval(estimate=2.0, low=1.4, high=2.6)
    kappa = Interval(estimate=4.0, low=3.2, high=5.0)
    found = divide(tau, kappa)
    assert found.estimate == 0.5
    assert found.low == pytest.approx(0.5 * (1 - math.hypot(0.3, 0.2)))
    assert found.high == pytest.approx(0.5 * (1 + math.hypot(0.3, 0.25)))
    assert divide(Interval(estimate=1.0, low=0.0, high=2.0), kappa).low == 0.0
