from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
from tests.unit.doctor.probe.planted import SMALL, Clock

from forerun.measure.profile import ProfileCell, Quantity, without
from forerun.measure.rigs import corrected, estimates, measure, widest


def cell(size, batch=1, context=8, quantity=Quantity.TARGET_PASS) -> ProfileCell:
    return ProfileCell(quantity=quantity, batch=batch, context=context, size=size)


class LoggingRig:
    """Writes down what is done to it."""

    def __init__(self, name, cells, log, rounds_per_visit=1) -> None:
        self.name = name
        self.rounds_per_visit = rounds_per_visit
        self._cells = cells
        self.log = log

    @property
    def cells(self):
        return self._cells

    @contextmanager
    def ready(self):
        self.log.append((self.name, "ready"))
        yield
        self.log.append((self.name, "done"))

    def visit(self, cell):
        self.log.append((self.name, cell.size))
        return {cell: (1.0,)}


def test_rounds_visit_every_cell_in_an_order_that_rotates():
    log: list = []
    rigs = [
        LoggingRig("a", [cell(1), cell(2)], log),
        LoggingRig("b", [cell(1, context=9), cell(2, context=9)], log),
    ]
    measure(rigs, replace(SMALL, min_rounds=2, budget_s=1e-15), Clock(), lambda rounds, error: None)
    a = [("a", "ready"), ("a", 1), ("a", 2), ("a", "done")]
    b = [("b", "ready"), ("b", 1), ("b", 2), ("b", "done")]
    second = [
        *[("b", "ready"), ("b", 2), ("b", 1), ("b", "done")],
        *[("a", "ready"), ("a", 2), ("a", 1), ("a", "done")],
    ]
    assert log == [*a, *b, *a, *b, *second]  # the first is the warm-up


def test_a_rig_may_sit_rounds_out():
    log: list = []
    rigs = [LoggingRig("a", [cell(1)], log), LoggingRig("b", [cell(2)], log, rounds_per_visit=3)]
    config = replace(SMALL, min_rounds=5, budget_s=1e-15)
    found = measure(rigs, config, Clock(), lambda rounds, error: None)
    assert [len(visit) for visit in found.samples[cell(1)]] == [1, 1, 1, 1, 1]
    assert [len(visit) for visit in found.samples[cell(2)]] == [1, 0, 0, 1, 0]
    assert not found.stable


def test_a_cell_that_came_with_another_is_not_visited_again():
    log: list = []
    rig = LoggingRig("a", [cell(1), cell(2)], log)
    alone = rig.visit
    rig.visit = lambda one: alone(one) | {cell(2): (7.0,)}
    found = measure([rig], replace(SMALL, budget_s=1e-15), Clock(), lambda rounds, error: None)
    assert [entry for entry in log if isinstance(entry[1], int)] == [("a", 1)] * 2
    assert found.samples[cell(2)] == [(7.0,)]


@pytest.mark.parametrize(("budget_s", "num_rounds"), [(19.0, 1), (20.0, 2), (29.0, 2)])
def test_no_round_begins_that_would_end_after_the_budget(budget_s, num_rounds):
    clock, log = Clock(), []
    rig = LoggingRig("a", [cell(1)], log)
    alone = rig.visit

    def visit_of_ten_seconds(one):
        clock.now_s += 10.0
        return alone(one)

    rig.visit = visit_of_ten_seconds
    config = replace(SMALL, budget_s=budget_s + 1e-6)  # reading the clock takes a little
    found = measure([rig], config, clock, lambda rounds, error: None)
    assert len(found.samples[cell(1)]) == num_rounds


def test_an_error_equal_to_the_target_error_ends_the_measurement_as_stable():
    rig = LoggingRig("a", [cell(1)], [])
    rig.visit = lambda one: {one: (0.5, 1.0, 1.0, 1.0, 1.0, 1.5)}
    errors: list = []
    config = replace(SMALL, target_error=0.5)
    found = measure([rig], config, Clock(), lambda rounds, error: errors.append(error))
    assert errors == [0.5]
    assert found.stable


def test_weather_is_what_a_round_did_to_most_cells():
    # The second round was twice as slow throughout; the third only for one cell.
    samples = {
        cell(1): [[1.0], [2.0], [1.0]],
        cell(2): [[3.0], [6.0], [3.0]],
        cell(4): [[5.0], [10.0], [9.0]],
    }
    found = corrected(samples)
    assert found[cell(1)] == pytest.approx([1.0, 1.0, 1.0])
    assert found[cell(4)][2] == pytest.approx(9.0)


def test_a_round_that_left_a_cell_out_says_nothing_about_it():
    samples = {cell(1): [[1.0], [2.0]], cell(2): [[3.0], []]}
    # Relative to their medians of 1.5 and 3 the cells took 2/3 and 1 in the first round: 5/6.
    assert corrected(samples)[cell(2)] == pytest.approx([3.0 / (5 / 6)])


def test_estimates_are_medians_of_all_visits():
    samples = {cell(1): [[1.0, 1.0, 4.0], [1.0, 1.0, 9.0]]}
    assert estimates(samples)[cell(1)].estimate == pytest.approx(1.0)


def test_the_error_of_an_overhead_is_taken_of_the_pass_it_is_added_to():
    steady = {cell(1): [[10.0]] * 6}
    tiny = cell(0, quantity=Quantity.GREEDY_OVERHEAD)
    assert widest(steady | {tiny: [[0.1, 0.3]] * 6}) == pytest.approx(0.1 / 10)


def test_cells_of_no_time_at_all_do_not_disturb():
    samples = {cell(1): [[1.0]] * 6, cell(2): [[0.0]] * 6}
    assert widest(samples) == 0.0


def test_too_few_samples_say_nothing_about_the_error():
    assert widest({cell(1): [[1.0]] * 5}) == math.inf


def test_larger_passes_go_with_the_one_that_failed():
    cells = [cell(rows, batch) for batch in (1, 2) for rows in (1, 2, 4)]
    assert without(cells, cell(2, batch=2)) == [cell(1), cell(2), cell(4), cell(1, 2)]


def test_a_batch_without_its_smallest_pass_takes_larger_batches_with_it():
    cells = [cell(rows, batch) for batch in (1, 2, 4) for rows in (1, 2)]
    assert without(cells, cell(1, batch=2)) == [cell(1), cell(2)]


def test_a_batch_whose_chains_do_not_fit_goes_too():
    chain = cell(4, batch=2, quantity=Quantity.DRAFT_CHAIN)
    cells = [cell(1), cell(1, batch=2), replace(chain, size=1), chain]
    assert without(cells, chain) == [cell(1)]
