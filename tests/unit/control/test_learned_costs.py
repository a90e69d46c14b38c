"""Without a profile `auto` learns what steps take, gives up a useless draft and finds it again."""

from __future__ import annotations

import logging

import pytest
from tests.simulated import World, best_rate, table

from forerun.control.base import Plan
from forerun.control.goodput import GoodputController
from forerun.control.learned_costs import LearnedCosts, MeasuredMean, bent
from forerun.control.named import ControllerInputs, build_controller

pytestmark = pytest.mark.usefixtures("unchecked")


def auto():
    return build_controller("auto", ControllerInputs(methods=("d",), num_speculative_tokens=8))


def world(acceptance, **changes) -> World:
    return World(acceptance, {"d": table(**changes)}, noise=0.05)


@pytest.mark.parametrize("draft", [0.02, 0.1, 0.5])
def test_a_useless_draft_reaches_95_percent_of_plain_over_256_tokens(draft):
    ours = world(lambda *_: 0.02, draft=draft, row=0.1)
    assert ours.run(auto(), 256) >= 0.95 * best_rate(0.0, table())


def test_drafting_is_given_up_within_30_steps():
    ours = world(lambda *_: 0.02, draft=0.3)
    ours.run(auto(), 200)
    drafted = [record.k_budget > 0 for record in ours.records]
    assert sum(drafted[30:]) < 0.1 * len(drafted[30:])


@pytest.mark.parametrize("row", [0.02, 0.3])
def test_a_good_draft_comes_close_to_the_best_fixed_k(row):
    ours = world(lambda *_: 0.85, row=row)
    assert ours.run(auto(), 600) >= 0.92 * best_rate(0.85, table(row=row))


def test_a_draft_that_pays_again_is_used_again_within_200_steps():
    ours = world(lambda _, __, step: 0.85 if step < 200 or step >= 500 else 0.0)
    ours.run(auto(), 900)
    drafts = [record.k_budget > 0 for record in ours.records]
    assert sum(drafts[100:200]) > 80
    assert sum(drafts[450:500]) < 10
    assert sum(drafts[700:]) > 0.8 * 200


def test_giving_up_is_logged_once(caplog):
    with caplog.at_level(logging.WARNING, logger="forerun.control"):
        ours = world(lambda _, __, step: 0.85 if 300 < step < 500 else 0.0, draft=0.3)
        ours.run(auto(), 900)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "slower than plain decoding" in line


def test_costs_are_those_of_the_steps():
    ours, costs = world(lambda *_: 0.7, row=0.1), LearnedCosts(["d"], 8)
    for k in (0, 1, 2, 3, 0, 3) * 60:
        states = ours.states()
        costs.pricing(states)
        draft_s, verify_s, other_s = ours.times([("d", k)])
        plan = Plan.chain("d", k)
        costs.observe([ours.record("r", plan, draft_s, verify_s, other_s)])
    times = costs.pricing(ours.states()).times["d"]
    assert times.plain_s == pytest.approx(0.01, rel=0.05)
    assert times.draft_s[0] == pytest.approx(0.001, rel=0.1)
    assert times.verify_s[3] == pytest.approx(0.013, rel=0.05)
    assert costs.largest_depth("d", 1) == 4


def test_passes_beyond_the_measured_ones_stay_above_the_line_by_as_much():
    mean = MeasuredMean()
    for _ in range(100):
        mean.observe(2.0)
    found = bent([1.0, 1.1, 1.2, 1.3], {2: mean})
    assert found[:2] == [1.0, 1.1]
    assert found[2] == pytest.approx(1.94, abs=0.05)
    assert found[3] == pytest.approx(1.3 + found[2] - 1.2)


def test_one_interrupted_step_does_not_move_a_mean_far():
    mean = MeasuredMean()
    mean.observe(1.0)
    mean.observe(1000.0)
    assert mean.mean <= 1.51
    mean = MeasuredMean()
    mean.observe(1000.0)  # kernels were compiled
    mean.observe(1.0)
    assert mean.mean == 1.0


def test_plain_plans_are_reused(monkeypatch):
    """Reuse is what makes `decide` cheap; its time is in benchmarks/control/decision_cost.py."""
    ours, controller = world(lambda *_: 0.02, draft=0.5), auto()
    ours.run(controller, 300)
    decided = []
    decide = GoodputController._decide_anew
    monkeypatch.setattr(
        GoodputController, "_decide_anew", lambda *args: decided.append(1) or decide(*args)
    )
    ours.run(controller, 300)
    assert len(decided) <= 30
