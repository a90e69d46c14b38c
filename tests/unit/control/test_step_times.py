"""Cost tables as numbers, and how steps correct them."""

from __future__ import annotations

import pytest
from tests import simulated

from forerun.control.profiled_costs import expected_times
from forerun.control.step_times import CostCell, StepTimes, Tables, TimeCorrection, TimeFactor

BENT = {1: 0.02, 4: 0.09, 8: 0.06}


@pytest.mark.parametrize("k", [1, 3, 8])
def test_cycles_are_those_of_the_table(k):
    costs = simulated.table(batches=(1, 4), overhead=BENT)
    place = CostCell(4, 2)
    times = StepTimes.read(costs, place, 8)
    cycle_s = k * times.draft_s[3] + times.verify_nodes_s(4 * k) + times.overhead_s[k]
    assert cycle_s == pytest.approx(costs.cycle_s(k, place.context, 4))
    assert times.plain_s == pytest.approx(costs.plain_step_s(place.context, 4))


def test_what_is_expected_of_a_step_has_the_overhead_of_every_methods_deepest_draft():
    costs = simulated.table(batches=(1, 4), overhead=BENT)
    times = StepTimes.read(costs, CostCell(4, 0), 8)
    drafts_s, overheads_s, pass_s = expected_times(
        {"d": [2, 5, 0], "e": [1]}, {"d": times, "e": times}
    )
    assert drafts_s["d"] == pytest.approx(2 * times.draft_s[1] + 3 * times.draft_s[0])
    assert drafts_s["e"] == times.draft_s[0]
    assert overheads_s["d"] == pytest.approx(costs.overhead_s(5, batch=4))
    assert overheads_s["e"] == pytest.approx(costs.overhead_s(1, batch=4))
    assert pass_s == times.verify_nodes_s(8)


def test_between_whole_rows_passes_are_linear_in_the_nodes():
    times = StepTimes.read(simulated.table(batches=(1, 4)), CostCell(4, 0), 2)
    assert len(times.verify_s) == 9
    assert times.verify_nodes_s(2) == pytest.approx((times.verify_s[0] + times.verify_s[4]) / 2)
    assert times.verify_nodes_s(2.5) == pytest.approx((times.verify_s[2] + times.verify_s[3]) / 2)
    assert times.verify_nodes_s(8) == times.verify_s[8]


def test_places_hold_the_contexts_of_a_bucket():
    assert CostCell.of(2, 300.0) == CostCell.of(2, 511.0) != CostCell.of(2, 512.0)
    assert CostCell.of(2, 300.0).context == 384


def test_tables_are_read_once_per_place():
    asked = []

    class Costs:
        def at(self, temperature):
            asked.append(temperature)
            return simulated.table()

    tables = Tables({"d": Costs()}, 4)
    for greedy in (True, True, False):
        tables.at("d", CostCell(1, 0), greedy=greedy)
    assert asked == [0.0, 1.0]


def test_a_factor_becomes_what_steps_took():
    factor = TimeFactor()
    for _ in range(300):
        factor.observe(0.013, 0.010)
    assert factor.value() == pytest.approx(1.3, abs=0.06)


def test_a_table_that_is_far_off_is_corrected_all_the_same():
    factor = TimeFactor()
    for _ in range(300):
        factor.observe(0.1, 0.010)
    assert factor.value() > 5.0


def test_what_is_slow_at_one_kind_is_believed_slow_at_the_other_until_it_is_seen():
    correction = TimeCorrection()
    for _ in range(100):
        correction.rests.observe(0.013, 0.010)
    assert 1.15 < correction.plain_factor <= correction.pass_factor
    assert correction.draft_factor("d") > 1.15
    for _ in range(100):
        correction.plain.observe(0.010, 0.010)
    assert correction.plain_factor == pytest.approx(1.0, abs=0.03)
    assert 1.0 < correction.draft_factor("d") == correction.pass_factor


def test_a_step_that_was_held_up_is_hardly_believed():
    factor = TimeFactor()
    factor.observe(50.0, 0.010)
    assert factor.value() < 1.3
