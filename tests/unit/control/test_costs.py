"""The cost model: proportions of a profile or assumed ones, corrected by measured steps."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.records import STEP
from tests.simulated import Tables, World, table

from forerun.control.base import Plan, RequestState
from forerun.control.config import GoodputConfig
from forerun.control.costs import (
    BatchCosts,
    CostModel,
    DrafterTraits,
    OperatingPoint,
    Rest,
    StepTimes,
    TimeFactor,
    ratios,
)

pytestmark = pytest.mark.usefixtures("unchecked")

BENT = {1: 0.02, 4: 0.09, 8: 0.06}
CONFIG = GoodputConfig()


def point(batch: int = 1, context: int = 100) -> OperatingPoint:
    state = RequestState(request_id="r", num_committed=context, max_new=9, temperature=1.0)
    return OperatingPoint.of([state] * batch)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_steps_take_what_the_table_says(k):
    costs, place = table(batches=(1, 4), overhead=BENT), point(4)
    times = StepTimes.read(costs, place, 8, 8)
    cycle_s = times.chain_s(k) + times.verify_nodes_s(4 * k)
    assert cycle_s == pytest.approx(costs.cycle_s(k, place.context, 4))
    assert times.plain_s == pytest.approx(costs.plain_step_s(place.context, 4))


def test_between_whole_rows_passes_are_linear_in_the_nodes():
    times = StepTimes.read(table(batches=(1, 4)), point(4), 2, 2)
    assert len(times.verify_s) == 9
    assert times.verify_nodes_s(2) == pytest.approx((times.verify_s[0] + times.verify_s[4]) / 2)
    assert times.verify_nodes_s(2.5) == pytest.approx((times.verify_s[2] + times.verify_s[3]) / 2)
    assert times.verify_nodes_s(8) == times.verify_s[8]


def test_contexts_of_as_many_digits_share_an_operating_point():
    assert point(context=300) == point(context=511) != point(context=512)
    assert point(context=300).context == 384


def test_tables_are_read_once_per_operating_point():
    asked = []

    class Costs:
        def at(self, temperature):
            asked.append(temperature)
            return table()

    model = CostModel({"d": Costs()}, 4, 0, CONFIG)
    for _ in range(3):
        model.times(point())
    assert asked == [1.0]


def test_a_ratio_becomes_that_of_the_steps():
    factor = TimeFactor(CONFIG)
    for _ in range(300):
        factor.observe(0.013, 0.010)
    assert factor.value(1.0) == pytest.approx(1.3, abs=0.04)


def test_one_outlier_counts_little_and_a_second_one_is_none():
    factor = TimeFactor(CONFIG)
    for _ in range(50):
        factor.observe(0.010, 0.010)
    factor.observe(50.0, 0.010)
    assert factor.value(1.0) < 1.05
    factor.observe(50.0, 0.010)
    assert factor.mean == pytest.approx(5000.0)
    factor.observe(0.010, 0.010)  # what was measured before had been interrupted
    assert factor.mean == pytest.approx(1.0)


def test_the_ratio_of_a_number_of_rows_is_expected_of_larger_numbers():
    costs = BatchCosts(CONFIG)
    for _ in range(300):
        costs.observe_pass(3, 0.02, 0.01)
    assert ratios(costs.passes, 1.0, 5) == pytest.approx([1.0, 1.0, 2.0, 2.0, 2.0], abs=0.12)


def test_a_machine_that_is_slow_at_one_part_is_expected_to_be_slow_at_the_others():
    model, place = CostModel({"d": Tables(table())}, 4, 0, CONFIG), point()
    expected = model.times(place)["d"]
    for _ in range(100):
        record = replace(STEP, k_budget=0, num_drafted=0, draft_s=0.0, verify_s=0.013, other_s=0.0)
        model.observe([record], place)
    found = model.times(place)["d"]
    assert found.plain_s == pytest.approx(1.3 * expected.plain_s, rel=0.02)
    assert found.verify_s[4] == pytest.approx(1.3 * expected.verify_s[4], rel=0.02)
    assert found.draft_s[0] == pytest.approx(1.3 * expected.draft_s[0], rel=0.02)


@pytest.mark.parametrize("profile", [True, False])
def test_costs_become_those_of_the_steps(profile):
    """Rows and drafts cost many times what is profiled or assumed."""
    truth = table(draft=0.5, row=0.2, overhead=0.3)
    ours = World(lambda *_: 0.7, {"d": truth}, noise=0.05)
    model = CostModel({"d": Tables(table()) if profile else None}, 8, 0, CONFIG)
    for k in (0, 1, 2, 3, 0, 3) * 60:
        place = OperatingPoint.of(ours.states())
        draft_s, verify_s, other_s = ours.times([("d", k)])
        record = ours.record("r", Plan.chain("d", k), draft_s, verify_s, other_s)
        model.observe([record], place)
    times = model.times(OperatingPoint.of(ours.states()))["d"]
    assert times.plain_s == pytest.approx(0.01, rel=0.05)
    assert times.chain_s(1) == pytest.approx(0.008, rel=0.1)
    assert times.chain_s(3) == pytest.approx(0.018, rel=0.1)
    assert times.verify_s[3] == pytest.approx(0.016, rel=0.1)
    assert model.largest_depth("d", 1) == (8 if profile else 4)


def test_a_step_without_a_proposal_is_no_plain_step():
    """A drafter that finds nothing has taken time all the same."""
    model, place = CostModel({"d": None}, 4, 0, CONFIG), point()
    plain = replace(STEP, k_budget=0, num_drafted=0, draft_s=0.0, verify_s=0.01, other_s=0.0)
    tried = replace(STEP, method="d", k_budget=2, num_drafted=0, draft_s=0.003, other_s=0.006)
    for _ in range(20):
        model.observe([plain], place)
        model.observe([tried], place)
    times = model.times(place)["d"]
    assert times.plain_s == pytest.approx(0.01)
    assert times.overhead_s[1] == pytest.approx(0.009, rel=0.2)


def test_plain_steps_without_records_count_with_the_one_after_them():
    model, place = CostModel({"d": None}, 4, 0, CONFIG), point()
    decision = replace(STEP, k_budget=0, num_drafted=0, draft_s=0.0, verify_s=0.016, other_s=0.0)
    model.observe([decision], place, rest=Rest(num_steps=15, seconds=0.15))
    assert model.times(place)["d"].plain_s == pytest.approx(0.166 / 16)


def test_a_new_batch_size_begins_with_the_costs_of_the_nearest():
    model = CostModel({"d": None}, 4, 0, CONFIG)
    for _ in range(20):
        record = replace(STEP, k_budget=0, num_drafted=0, draft_s=0.0, verify_s=0.013, other_s=0.0)
        model.observe([record], point())
    assert model.times(point(8))["d"].plain_s == pytest.approx(0.013)
    # What another batch size taught has the weight of one step: the next one counts as much.
    record = replace(STEP, k_budget=0, num_drafted=0, draft_s=0.0, verify_s=0.019, other_s=0.0)
    model.observe([record] * 8, point(8))
    assert model.times(point(8))["d"].plain_s == pytest.approx(0.016, rel=0.01)


def test_a_dear_drafted_level_is_not_charged_once_more_as_overhead():
    """A self-draft costs what its pass reads; the rest of its step is that of any drafter."""
    model = CostModel({"d": None}, 4, 0, CONFIG, {"d": DrafterTraits(level_cost=0.4)})
    times = model.times(point())["d"]
    for k in (1, 3):
        expected = (0.4 * k + CONFIG.assumed_level) * times.plain_s
        assert times.chain_s(k) == pytest.approx(expected)


def test_a_drafter_without_a_profile_is_assumed_beside_one_with_a_profile():
    model = CostModel({"d": Tables(table()), "e": None}, 4, 0, CONFIG)
    times = model.times(point())
    assert times["e"].plain_s == times["d"].plain_s
    assert times["e"].draft_s[0] == pytest.approx(CONFIG.assumed_level * times["d"].plain_s)
    assert (model.largest_depth("d", 1), model.largest_depth("e", 1)) == (4, 1)
