from __future__ import annotations

from dataclasses import replace
from itertools import product

import msgspec
import pytest

from forerun.theory.cost import CostLine, CostTable

LINE = CostLine(
    rows=(1, 2, 4, 8),
    verify_s=(0.010, 0.011, 0.012, 0.020),
    plain_s=0.010,
    draft_s=0.001,
    overhead_s=(0.0005,),
)
FLAT = CostTable(lines=(LINE,))
SHORT = CostLine(rows=(1, 5), verify_s=(0.010, 0.014), plain_s=0.010, draft_s=0.001)
LONG = CostLine(context=1000, rows=(1, 5), verify_s=(0.020, 0.032), plain_s=0.020, draft_s=0.003)
DEEP = CostTable(lines=(SHORT, LONG))
WIDE = CostTable(
    lines=(
        LINE,
        CostLine(
            batch=5,
            rows=(1, 2),
            verify_s=(0.018, 0.027),
            plain_s=0.018,
            draft_s=0.002,
            overhead_s=(0.001,),
        ),
    )
)
# 2% on the plain step, 3% on the pass, draft and overhead known exactly.
BARS = replace(LINE, plain_error_s=0.0002, verify_error_s=(0.0003, 0.00033, 0.00036, 0.0006))
BENT = replace(
    LINE, overhead_ks=(1, 2, 5), overhead_s=(0.003, 0.001, 0.002), overhead_error_s=(3e-4, 1e-4, 0)
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
    table = CostTable(lines=(replace(SHORT, context=100), replace(LONG, context=1100)))
    assert table.verify_step_s(5, context=0) == pytest.approx(0.014)


def test_a_falling_last_context_is_not_extrapolated_downwards():
    table = CostTable(lines=(replace(SHORT, plain_s=0.020), replace(LONG, plain_s=0.018)))
    assert table.plain_step_s(10_000) == pytest.approx(0.018)


def test_between_batches_everything_is_linear():
    assert WIDE.plain_step_s(batch=3) == pytest.approx(0.014)
    assert WIDE.verify_step_s(2, batch=3) == pytest.approx((0.011 + 0.027) / 2)
    assert WIDE.draft_token_s(batch=3) == pytest.approx(0.0015)


def test_a_batch_measured_at_fewer_rows_is_proportional_beyond_them():
    assert WIDE.verify_step_s(4, batch=5) == pytest.approx(0.054)


def test_beyond_the_largest_batch_a_cycle_is_dear_and_a_plain_step_is_not():
    assert WIDE.plain_step_s(batch=10) == pytest.approx(0.028)
    assert WIDE.verify_step_s(2, batch=10) == pytest.approx(0.054)
    assert WIDE.draft_token_s(batch=10) == pytest.approx(0.004)
    kappa = (0.004 + 0.054 + 0.002) / 0.028
    assert WIDE.cycle_cost(1, batch=10) == pytest.approx(kappa)


def test_noise_never_makes_more_rows_cheaper():
    noisy = CostTable(lines=(replace(LINE, verify_s=(0.010, 0.014, 0.012, 0.020)),))
    assert noisy.verify_step_s(2) == pytest.approx(0.013)
    assert noisy.verify_step_s(4) == pytest.approx(0.013)
    costs = [noisy.verify_cost(rows) for rows in range(1, 20)]
    assert costs == sorted(costs)


def test_cycle_cost_is_k_c_plus_v_plus_o():
    assert FLAT.draft_cost() == pytest.approx(0.1)
    assert FLAT.overhead(3) == pytest.approx(0.05)
    assert FLAT.cycle_cost(3) == pytest.approx(3 * 0.1 + 1.2 + 0.05)
    assert FLAT.cycle_s(3) == pytest.approx(0.0155)


@pytest.mark.parametrize(
    ("k", "overhead_s"),
    [(1, 3e-3), (2, 1e-3), (3, 4e-3 / 3), (4, 5e-3 / 3), (5, 2e-3), (8, 3e-3)],
)
def test_overhead_is_linear_between_measured_k_and_goes_on_rising(k, overhead_s):
    table = CostTable(lines=(BENT,))
    assert table.overhead_s(k) == pytest.approx(overhead_s)
    assert table.overhead(k) == pytest.approx(overhead_s / 0.010)
    cycle_s = 0.001 * k + table.verify_step_s(k + 1) + overhead_s
    assert table.cycle_s(k) == pytest.approx(cycle_s)
    assert table.cycle_cost_interval(k).estimate == pytest.approx(cycle_s / 0.010)


def test_overhead_is_constant_before_the_first_k_and_never_falls_on():
    line = replace(LINE, overhead_ks=(2, 4), overhead_s=(0.003, 0.001))
    assert [line.overhead(k).s for k in (1, 2, 3, 4, 9)] == pytest.approx(
        [0.003, 0.003, 0.002, 0.001, 0.001]
    )


def test_overhead_between_batches_is_that_of_the_same_k():
    wider = replace(LINE, batch=5, overhead_ks=(1, 3), overhead_s=(0.005, 0.007))
    table = CostTable(lines=(BENT, wider))
    assert table.overhead_s(2, batch=3) == pytest.approx((0.001 + 0.006) / 2)


def test_the_error_of_overhead_is_that_at_its_k():
    found = CostTable(lines=(replace(BENT, plain_error_s=0.0),)).cycle_cost_interval(1)
    assert found.high - found.estimate == pytest.approx(3e-4 / 0.010)


def test_no_speculation_costs_one_plain_step():
    assert FLAT.cycle_cost(0) == 1.0
    assert FLAT.cycle_s(0) == FLAT.plain_step_s()
    alone = FLAT.cycle_cost_interval(0)
    assert (alone.low, alone.estimate, alone.high) == (1.0, 1.0, 1.0)


def test_errors_of_both_sides_add_up_in_quadrature():
    found = CostTable(lines=(BARS,)).verify_cost_interval(4)
    reach = 1.2 * (0.03**2 + 0.02**2) ** 0.5
    assert found.estimate == pytest.approx(1.2)
    assert (found.low, found.high) == pytest.approx((1.2 - reach, 1.2 + reach))


def test_drafting_counts_its_error_once_per_token():
    line = replace(LINE, draft_error_s=0.0001, overhead_error_s=(0.0002,))
    found = CostTable(lines=(line,)).cycle_cost_interval(3)
    assert found.estimate == pytest.approx(FLAT.cycle_cost(3))
    assert found.high - found.estimate == pytest.approx((0.03**2 + 0.02**2) ** 0.5)


def test_errors_between_two_measurements_lie_between_theirs():
    found = CostTable(lines=(BARS,)).verify_cost_interval(6)
    assert found.high - found.estimate > 0
    assert BARS.verify(6).error_s == pytest.approx((0.00036 + 0.0006) / 2)


def test_where_the_fit_moved_a_value_the_error_reaches_what_was_measured():
    line = replace(BARS, verify_s=(0.010, 0.014, 0.012, 0.020))
    for rows, measured_s in zip(line.rows, line.verify_s, strict=True):
        found = line.verify(rows)
        assert abs(found.s - measured_s) <= found.error_s + 1e-12


def test_without_errors_intervals_have_no_width():
    found = FLAT.verify_cost_interval(4)
    assert found.low == found.estimate == found.high


@pytest.mark.parametrize(
    "table", [FLAT, DEEP, WIDE, CostTable(lines=(BARS,)), CostTable(lines=(BENT,))]
)
def test_tables_survive_json(table):
    assert msgspec.json.decode(msgspec.json.encode(table), type=CostTable) == table


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": (2, 3, 4, 8)}, "must begin at 1"),
        ({"rows": (1, 4, 4, 8)}, "must be ascending"),
        ({"rows": ()}, "not empty"),
        ({"batch": 0}, "batch is 0"),
        ({"context": -1}, "context -1"),
        ({"rows": (1, 2)}, "verify_s has 4 entries; it needs 2"),
        ({"verify_error_s": (0.1,)}, "verify_error_s has 1 entries; it needs 4"),
        ({"plain_s": 0.0}, "plain_s contains 0.0 s"),
        ({"draft_s": -1.0}, "draft_s contains -1.0 s"),
        ({"overhead_s": (float("inf"),)}, "overhead_s contains inf"),
        ({"plain_error_s": float("nan")}, "plain_error_s contains nan"),
        ({"overhead_s": (-1e-9,)}, "overhead_s contains -1e-09 s"),
        ({"overhead_s": (0.1, 0.2)}, "overhead_s has 2 entries; it needs 1, as many as overhead"),
        ({"overhead_error_s": (0.1, 0.2)}, "overhead_error_s has 2 entries; it needs 1"),
        ({"overhead_ks": ()}, "overhead_ks is .*not empty"),
        ({"overhead_ks": (0,)}, "overhead_ks is .*ascending from 1 or more"),
        ({"overhead_ks": (2, 1), "overhead_s": (0.1, 0.1)}, "overhead_ks is .*must be ascending"),
    ],
)
def test_malformed_lines_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(LINE, **changes)


@pytest.mark.parametrize(
    "places", [[], [(1, 0), (1, 0)], [(1, 0), (2, 0), (1, 9)]], ids=["none", "twice", "missing"]
)
def test_lines_must_make_a_grid(places):
    lines = tuple(replace(LINE, batch=batch, context=context) for batch, context in places)
    with pytest.raises(ValueError, match="one per pair"):
        CostTable(lines=lines)


def test_the_order_of_lines_does_not_matter():
    grid = [
        replace(LINE, batch=batch, context=context, plain_s=0.01 * batch + context * 1e-5)
        for batch, context in product((1, 4), (0, 100))
    ]
    forwards, backwards = CostTable(lines=tuple(grid)), CostTable(lines=tuple(reversed(grid)))
    assert forwards.plain_step_s(50, 2) == pytest.approx(backwards.plain_step_s(50, 2))
    assert forwards.plain_step_s(50, 2) == pytest.approx(0.02 + 50e-5)


@pytest.mark.parametrize(
    "changes",
    [{"rows": 5}, {"rows": [1, 2.5, 4, 8]}, {"draft_s": "fast"}, {"overhead_s": [True]}],
)
def test_lines_of_other_values_are_refused(changes):
    with pytest.raises(msgspec.ValidationError, match=next(iter(changes))):
        msgspec.convert({**msgspec.to_builtins(LINE), **changes}, CostLine)


def test_a_pass_has_rows_and_sequences():
    with pytest.raises(ValueError, match="num_rows is 0"):
        FLAT.verify_cost(0)
    with pytest.raises(ValueError, match="K is 0"):
        FLAT.overhead(0)
    with pytest.raises(ValueError, match="batch is 0"):
        FLAT.plain_step_s(batch=0)
