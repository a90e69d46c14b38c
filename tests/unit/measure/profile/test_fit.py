from __future__ import annotations

import pytest

from forerun.measure.profile import ProfileCell, Quantity
from forerun.measure.rigs import cost_table, slope_of
from forerun.theory.cost import CostReading
from forerun.theory.intervals import Interval

# Steps whose part beyond the passes bends over K, and a pass of 5 rows that noise has made dear.
PASSES_S = {8: {1: 1.0, 2: 1.1, 3: 1.2, 5: 1.5, 9: 1.4}, 40: {1: 2.0, 2: 2.2, 3: 2.4, 5: 2.8, 9: 3}}
CHAINS_S = {8: {1: 0.2, 2: 0.3, 4: 0.5}, 40: {1: 0.3, 2: 0.5, 4: 0.9}}
STEPS_S = {0: 1.2, 1: 1.8, 2: 2.3, 4: 2.5}


def times(quantity, context, seconds):
    return {
        ProfileCell(quantity=quantity, batch=1, context=context, size=size): Interval(
            estimate=s, low=0.9 * s, high=1.1 * s
        )
        for size, s in seconds.items()
    }


def estimates(steps_s=STEPS_S):
    found = {}
    for context in (8, 40):
        found |= times(Quantity.TARGET_PASS, context, PASSES_S[context])
        found |= times(Quantity.DRAFT_CHAIN, context, CHAINS_S[context])
        found |= times(Quantity.DRAFT_PASS, context, {1: CHAINS_S[context][1]})
    found |= times(Quantity.GREEDY_STEP, 8, steps_s)
    return found | times(Quantity.SAMPLED_STEP, 8, {k: s + 0.3 for k, s in steps_s.items()})


@pytest.mark.parametrize("sampled", [False, True])
def test_at_the_shortest_context_a_cycle_takes_what_was_measured(sampled):
    table = cost_table(estimates(), sampled=sampled)
    for k, step_s in STEPS_S.items():
        assert table.cycle_s(k, 8) == pytest.approx(step_s + 0.3 * sampled)
    between_s = 3 * table.draft_token_s(8) + table.verify_step_s(4, 8)
    assert table.overhead_s(3, 8) == pytest.approx(
        (table.overhead_s(2, 8) + table.overhead_s(4, 8)) / 2
    )
    assert table.cycle_s(3, 8) == pytest.approx(between_s + table.overhead_s(3, 8))


def test_at_other_contexts_a_cycle_grows_as_its_passes_do():
    table = cost_table(estimates(), sampled=False)
    for k in (1, 2, 4):
        chain_s = CHAINS_S[40][k] - CHAINS_S[8][k]
        pass_s = table.verify_step_s(k + 1, 40) - table.verify_step_s(k + 1, 8)
        assert table.cycle_s(k, 40) == pytest.approx(STEPS_S[k] + chain_s + pass_s)


def test_a_drafted_token_adds_the_slopes_of_chains_and_of_what_is_beyond_the_passes():
    straight = {0: 1.2, 1: 1.1 + 0.2 + 0.3, 2: 1.2 + 0.3 + 0.35, 4: 1.5 + 0.5 + 0.45}
    short, long = cost_table(estimates(straight), sampled=False).lines
    assert short.draft_s == pytest.approx(0.1 + 0.05)
    assert long.draft_s == pytest.approx(0.2 + 0.05)
    assert short.overhead_s[:2] == pytest.approx((0.35, 0.35))


def test_the_error_of_overhead_is_that_of_the_step():
    for line in cost_table(estimates(), sampled=False).lines:
        assert line.overhead_error_s == pytest.approx([0.1 * STEPS_S[k] for k in (1, 2, 4)])


def test_where_less_than_nothing_is_left_there_is_no_overhead():
    """Nothing at K = 1 and much at K = 4: the line through the origin is above the first."""
    found = cost_table(estimates({0: 1.2, 1: 1.3, 2: 1.6, 4: 3.9}), sampled=False)
    assert found.lines[0].overhead_s[0] == 0.0
    assert found.cycle_s(1, 8) > 1.3
    assert found.cycle_s(4, 8) == pytest.approx(3.9)


def test_two_points_give_the_line_through_them():
    assert slope_of({1: CostReading(3.0), 4: CostReading(9.0)}).s == pytest.approx(2.0)


def test_errors_follow_the_weights_of_the_points():
    slope = slope_of({1: CostReading(3.0, 0.3), 4: CostReading(9.0, 0.3)})
    assert slope.error_s == pytest.approx(0.3 * 2**0.5 / 3)


def test_more_points_are_fitted_in_least_squares():
    assert slope_of(
        {1: CostReading(1.0), 2: CostReading(3.0), 3: CostReading(2.0)}
    ).s == pytest.approx(0.5)


def test_one_point_lies_on_a_line_through_the_origin():
    assert slope_of({4: CostReading(8.0, 0.4)}) == CostReading(2.0, 0.1)


def test_a_line_that_would_start_below_nothing_goes_through_the_origin():
    assert slope_of({1: CostReading(1.0), 2: CostReading(3.0)}).s == pytest.approx(
        (1 * 1 + 2 * 3) / 5
    )


def test_below_nothing_there_is_nothing():
    assert slope_of({1: CostReading(-0.2, 0.5), 4: CostReading(-0.1, 0.5)}) == CostReading(0.0)


def test_a_falling_line_is_flat():
    assert slope_of({1: CostReading(5.0, 0.3), 4: CostReading(3.0, 0.3)}) == CostReading(
        0.0, pytest.approx(0.3 * 2**0.5 / 3)
    )
