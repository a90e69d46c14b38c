from __future__ import annotations

import json
from dataclasses import replace

import pytest

from forerun.theory.cost import CostTable

FLAT = CostTable(
    rows=(1, 2, 4, 8),
    verify_s=((0.010, 0.011, 0.012, 0.020),),
    plain_s=(0.010,),
    draft_s=(0.001,),
    overhead_s=0.0005,
)
DEEP = CostTable(
    rows=(1, 5),
    contexts=(0, 1000),
    verify_s=((0.010, 0.014), (0.020, 0.032)),
    plain_s=(0.010, 0.020),
    draft_s=(0.001, 0.003),
)


@pytest.mark.parametrize(
    ("num_rows", "expected"), [(1, 1.0), (2, 1.1), (3, 1.15), (4, 1.2), (5, 1.4), (8, 2.0)]
)
def test_rows_are_joined_by_lines(num_rows, expected):
    assert FLAT.verify_cost(num_rows) == pytest.approx(expected)


def test_beyond_the_most_rows_cost_is_proportional():
    assert FLAT.verify_cost(16) == pytest.approx(4.0)
    assert FLAT.verify_cost(12) == pytest.approx(3.0)


def test_one_context_serves_every_context():
    assert FLAT.verify_cost(4, context=9000) == FLAT.verify_cost(4)


def test_rows_and_context_are_bilinear():
    # Half way both ways: the mean of the four corners.
    assert DEEP.verify_step_s(3, context=500) == pytest.approx((10 + 14 + 20 + 32) / 4000)
    assert DEEP.plain_step_s(500) == pytest.approx(0.015)
    assert DEEP.draft_cost(500) == pytest.approx(0.002 / 0.015)


def test_beyond_the_longest_context_the_slope_goes_on():
    assert DEEP.plain_step_s(2000) == pytest.approx(0.030)
    assert DEEP.verify_step_s(5, context=2000) == pytest.approx(0.050)


def test_below_the_shortest_context_the_shortest_holds():
    table = replace(DEEP, contexts=(100, 1100))
    assert table.verify_step_s(5, context=0) == pytest.approx(0.014)


def test_a_falling_last_context_is_not_extrapolated_downwards():
    table = replace(DEEP, plain_s=(0.020, 0.018))
    assert table.plain_step_s(10_000) == pytest.approx(0.018)


def test_noise_never_makes_more_rows_cheaper():
    noisy = replace(FLAT, verify_s=((0.010, 0.014, 0.012, 0.020),))
    assert noisy.verify_step_s(2) == pytest.approx(0.013)
    assert noisy.verify_step_s(4) == pytest.approx(0.013)
    costs = [noisy.verify_cost(rows) for rows in range(1, 20)]
    assert costs == sorted(costs)


def test_cycle_cost_is_k_c_plus_v_plus_o():
    assert FLAT.draft_cost() == pytest.approx(0.1)
    assert FLAT.overhead() == pytest.approx(0.05)
    assert FLAT.cycle_cost(3) == pytest.approx(3 * 0.1 + 1.2 + 0.05)
    assert FLAT.cycle_s(3) == pytest.approx(0.0155)


def test_no_speculation_costs_one_plain_step():
    assert FLAT.cycle_cost(0) == 1.0
    assert FLAT.cycle_s(0) == FLAT.plain_step_s()


@pytest.mark.parametrize("table", [FLAT, DEEP], ids=["flat", "deep"])
def test_tables_survive_json(table):
    assert CostTable.from_dict(json.loads(json.dumps(table.to_dict()))) == table


def test_what_is_written_is_what_was_measured():
    noisy = replace(FLAT, verify_s=((0.010, 0.014, 0.012, 0.020),))
    assert noisy.to_dict()["verify_s"] == ((0.010, 0.014, 0.012, 0.020),)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": (2, 3, 4, 8)}, "must begin at 1"),
        ({"rows": (1, 4, 4, 8)}, "must be ascending"),
        ({"rows": ()}, "not empty"),
        ({"contexts": (0, 10)}, "verify_s has 1 entries; it needs 2"),
        ({"plain_s": (0.1, 0.2)}, "plain_s has 2 entries; it needs 1"),
        ({"rows": (1, 2)}, "a line of verify_s has 4 entries; it needs 2"),
        ({"plain_s": (0.0,)}, "plain_s contains 0.0 s"),
        ({"draft_s": (-1.0,)}, "draft_s contains -1.0 s"),
        ({"overhead_s": float("inf")}, "overhead_s contains inf"),
    ],
)
def test_malformed_tables_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(FLAT, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": None}, "lacks rows"),
        ({"speed": 3}, "unknown fields speed"),
        ({"rows": 5}, "rows is 5; it must be a list"),
        ({"rows": [1, 2.5, 4, 8]}, "whole numbers"),
        ({"draft_s": ["fast"]}, "draft_s contains 'fast'"),
        ({"overhead_s": True}, "overhead_s contains True"),
        ({"verify_s": [0.1]}, "a line of verify_s is 0.1"),
    ],
)
def test_malformed_dictionaries_are_refused(changes, message):
    values = {**FLAT.to_dict(), **changes}
    with pytest.raises(ValueError, match=message):
        CostTable.from_dict({name: value for name, value in values.items() if value is not None})


def test_a_pass_has_rows():
    with pytest.raises(ValueError, match="num_rows is 0"):
        FLAT.verify_cost(0)
