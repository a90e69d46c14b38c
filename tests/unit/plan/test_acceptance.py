"""Given and counted acceptance: figures that cannot be, and errors worked out by hand."""

from __future__ import annotations

from statistics import stdev

import pytest

from forerun.errors import InvalidRequest
from forerun.plan.acceptance import (
    MIN_ALLOWED,
    Drafts,
    counted,
    given,
)


def request_of(*steps):
    """Drafts of (depth drafted, all that was allowed; accepted, how often)."""
    drafts = Drafts()
    for depth, accepted, times in steps:
        drafts.steps[depth, depth, accepted] += times
    return drafts


def test_one_figure_is_the_same_at_every_position():
    found = given([0.5], conditional=False, max_k=4)
    assert found.survival == (0.5, 0.25, 0.125, 0.0625)
    assert found.at(2).survival == (0.5, 0.25)
    assert found.is_constant


def test_figures_by_position_are_survival_unless_conditional():
    figures = [0.8, 0.8, 0.5]
    assert given(figures, conditional=False, max_k=9).survival == (0.8, 0.8, 0.5)
    assert given(figures, conditional=True, max_k=9).survival == pytest.approx((0.8, 0.64, 0.32))


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ([], "is empty"),
        ([1.2], "1.2 is no probability"),
        ([0.5, -0.1], "-0.1 is no probability"),
        ([float("nan")], "nan is no probability"),
        ([0.5, 0.6], "0.6 at position 2 is above 0.5 before it, which is impossible"),
    ],
)
def test_impossible_figures_are_refused(figures, message):
    with pytest.raises(InvalidRequest, match=message):
        given(figures, conditional=False, max_k=4)


def test_figures_that_are_given_have_no_error():
    tau = given([0.5], conditional=False, max_k=4).length(2)
    assert (tau.low, tau.estimate, tau.high) == (1.75, 1.75, 1.75)


def test_acceptance_is_not_known_deeper_than_it_was_given():
    with pytest.raises(ValueError, match="known for 2 positions, not 3"):
        given([0.5, 0.4], conditional=False, max_k=9).length(3)


def test_the_error_at_one_position_is_that_of_the_mean_over_requests():
    shares = [0.2, 0.5, 0.6, 0.9]
    found = counted(
        request_of((1, 1, round(100 * s)), (1, 0, 100 - round(100 * s))) for s in shares
    )
    tau = found.length(1)
    reach = 1.959964 * stdev(shares) / len(shares) ** 0.5
    assert tau.estimate == pytest.approx(1.55)
    assert tau.high - tau.estimate == pytest.approx(reach, rel=1e-6)
    assert tau.estimate - tau.low == pytest.approx(reach, rel=1e-6)


def test_equal_requests_have_no_error_and_one_request_a_known_none():
    steps = ((3, 0, 10), (3, 1, 10), (3, 3, 20))
    equal = counted([request_of(*steps)] * 3).length(3)
    assert equal.high - equal.low == pytest.approx(0.0, abs=1e-12)
    alone = counted([request_of(*steps)]).length(3)
    assert alone.low == alone.estimate == alone.high


def test_drafts_that_ended_early_are_censored():
    found = counted([request_of((1, 1, 50), (1, 0, 50), (2, 2, 50), (2, 0, 50))])
    assert found.survival == pytest.approx((0.5, 0.5))


def test_positions_that_few_steps_reached_are_left_out():
    few = MIN_ALLOWED - 1
    found = counted([request_of((1, 1, 50), (2, 2, few))])
    assert len(found.survival) == 1
    enough = counted([request_of((1, 1, 50), (2, 2, MIN_ALLOWED))])
    assert len(enough.survival) == 2
    with pytest.raises(InvalidRequest, match="19 steps drafted anything"):
        counted([request_of((2, 0, few)), request_of((0, 0, 40))])
