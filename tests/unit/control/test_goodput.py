"""Goodput: near the best fixed K where nothing changes, quick where it does, silent where told."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from tests.simulated import CAPACITY, Tables, World, best_rate, seconds_of, table

from forerun.control.base import Capacity, Controller, RequestState
from forerun.control.config import GoodputConfig
from forerun.control.fixed import FixedController
from forerun.control.goodput import GoodputController

pytestmark = pytest.mark.usefixtures("unchecked")

STATE = RequestState(request_id="r", num_committed=100, max_new=500, temperature=1.0)


def controller(config: GoodputConfig | None = None, **changes) -> GoodputController:
    return GoodputController({"d": Tables(table(**changes))}, 8, config)


def world(acceptance, *names: str, **changes) -> World:
    if isinstance(acceptance, float):
        alpha = acceptance
        acceptance = lambda *_: alpha  # noqa: E731
    return World(acceptance, {"d": table(**changes)}, names=names or ("r",), noise=0.05)


def test_it_is_a_controller():
    assert isinstance(controller(), Controller)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 0.9])
def test_it_comes_close_to_the_best_fixed_k(alpha):
    assert world(alpha).run(controller(), 1200) >= 0.94 * best_rate(alpha, table())


def test_a_useless_draft_costs_less_than_three_percent():
    assert world(0.0).run(controller(), 2000) >= 0.97 * best_rate(0.0, table())


def test_a_draft_that_goes_and_comes_back_is_followed_within_200_steps():
    ours = world(lambda _, __, step: 0.8 if step < 300 or step >= 700 else 0.0)
    ours.run(controller(), 1000)
    ks = [record.k_budget for record in ours.records]
    assert sum(ks[200:300]) > 3 * 100
    assert seconds_of(ours.records[500:700]) < 1.025 * 200 * table().plain_step_s(100)
    assert sum(ks[900:]) > 3 * 100


def test_a_mixed_stream_is_faster_than_under_any_fixed_k():
    def acceptance(method, name, step):
        return (0.9, 0.05)[step // 300 % 2]

    fixed = max(world(acceptance).run(FixedController(k, "d"), 600) for k in (1, 2, 3, 4, 5, 8))
    assert world(acceptance).run(controller(), 600) > 1.03 * fixed


def test_rows_of_a_batch_go_to_requests_whose_drafts_are_accepted():
    names = [f"r{index}" for index in range(8)]
    ours = world(lambda _, name, __: 0.9 if name < "r4" else 0.2, *names, batches=(1, 8))
    ours.run(controller(batches=(1, 8)), 150)
    last = ours.records[-400:]
    drafted = {name: sum(r.k_budget for r in last if r.request_id == name) for name in names}
    assert min(drafted[name] for name in names[:4]) > 2.5 * max(drafted[n] for n in names[4:])


def test_a_new_request_begins_with_what_its_kind_has_shown():
    ours = world(0.0)
    fitted = controller()
    ours.run(fitted, 200)
    fresh = replace(STATE, request_id="new")
    (plan,) = fitted.decide([fresh], CAPACITY)
    assert plan.probe or not plan.num_speculative_tokens
    (other,) = fitted.decide([replace(fresh, request_id="other", tags=("code",))], CAPACITY)
    assert other.num_speculative_tokens == 1  # nothing is known of it


def test_the_better_drafter_is_found_and_lost():
    def acceptance(method, name, step):
        return 0.85 if (method == "d") == (step < 500) else 0.3

    costs = table()
    ours = World(acceptance, {"d": costs, "e": costs})
    ours.run(GoodputController({"d": Tables(costs), "e": Tables(costs)}, 8), 1000)
    early = [record.method for record in ours.records[300:500]]
    late = [record.method for record in ours.records[700:]]
    assert early.count("d") > 0.9 * len(early)
    assert late.count("e") > 0.9 * len(late)


@pytest.mark.parametrize("told", [0.1, 4.0])
def test_what_trying_another_drafter_costs_is_measured(told):
    """It has to catch up first, of which the table says nothing."""
    num_steps = 4000
    ours = World(
        lambda method, *_: 0.85 if method == "d" else 0.3, {"d": table(), "e": table(draft=4.0)}
    )
    fitted = GoodputController({"d": Tables(table()), "e": Tables(table(draft=told))}, 8)
    ours.run(fitted, 300)
    ours.records.clear()
    ours.run(fitted, num_steps)
    others = [record for record in ours.records if record.method == "e"]
    mine = [record for record in ours.records if record.method == "d"]
    assert sum(record.k_budget == 1 for record in others) >= len(others) - 4
    assert len(mine) + len(others) == num_steps
    step_s = seconds_of(mine) / len(mine)
    tokens = sum(record.num_emitted for record in mine) / len(mine)
    lost = seconds_of(others) / step_s - sum(record.num_emitted for record in others) / tokens
    assert lost <= GoodputConfig().explore * num_steps + 8.0
    assert len(others) >= 2


def test_steps_that_take_longer_than_the_table_says_change_the_choice():
    """The table promises cheap drafts; they are dear."""
    ours = World(lambda *_: 0.5, {"d": table(draft=0.6)}, noise=0.05)
    ours.run(controller(draft=0.02), 800)
    assert sum(record.k_budget for record in ours.records[-200:]) < 2 * 200


def test_plans_change_less_often_where_more_has_to_be_gained():
    def changes(switch_margin: float) -> int:
        ours = world(0.6)
        ours.run(controller(GoodputConfig(switch_margin=switch_margin, explore=0.0)), 600)
        ks = [record.k_budget for record in ours.records]
        return sum(before != after for before, after in pairwise(ks))

    assert changes(0.05) < 0.5 * changes(0.0)


def test_a_target_for_the_time_per_token_is_heeded():
    state = replace(STATE, num_committed=100)
    ours = world(0.6)
    free = controller()
    ours.run(free, 200)
    assert free.decide([state], CAPACITY)[0].num_speculative_tokens > 0
    hurried = replace(state, request_id="hurried", tpot_target_s=0.0101)
    both = controller(batches=(1, 2))
    pair = world(lambda _, name, __: 0.95 if name == "r" else 0.02, "r", "hurried", batches=(1, 2))
    pair.run(both, 200)
    with_wish = both.decide([state, hurried], CAPACITY)
    without = both.decide([state, replace(hurried, tpot_target_s=None)], CAPACITY)
    assert without[0].num_speculative_tokens > 0
    assert with_wish[0].num_speculative_tokens < without[0].num_speculative_tokens


@pytest.mark.parametrize("measure", ["entropy", "top_probability"])
def test_plans_carry_the_calibrated_rule(measure):
    (plan,) = controller(GoodputConfig(stop=measure)).decide([STATE], CAPACITY)
    assert plan.num_speculative_tokens > 0
    assert plan.stop is not None
    assert plan.stop.measure == measure
    (plan,) = controller().decide([STATE], CAPACITY)
    assert plan.stop is None


def test_nobody_to_decide_for():
    assert controller().decide([], Capacity(max_rows=8)) == []


def test_plans_are_decided_anew_when_a_time_target_gets_tighter():
    """A deadline that comes closer than the tokens do; before that, plans hold as any others."""
    ours = world(0.9)
    settled = controller()
    ours.run(settled, 300)
    (state,) = ours.states()
    hurried = replace(state, time_left_s=0.02 * state.max_new)
    for _ in range(20):
        settled.decide([hurried], CAPACITY)
    while not settled._active.steps_left:  # a probe is not reused
        settled.decide([hurried], CAPACITY)
    active = settled._active
    late = replace(hurried, time_left_s=0.003 * state.max_new)
    settled.decide([late], CAPACITY)
    assert settled._active is not active
