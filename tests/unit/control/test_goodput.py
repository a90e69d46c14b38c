"""Goodput: near the best fixed K where nothing changes, quick where it does, silent where told."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from msgspec.structs import replace as changed
from tests.simulated import CAPACITY, Tables, World, best_rate, seconds_of, table

from forerun.control.base import Capacity, Controller, RequestState
from forerun.control.config import GoodputConfig
from forerun.control.costs import OperatingPoint
from forerun.control.goodput import GoodputController
from forerun.control.named import FixedController

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
    ours = world(0.0)
    assert ours.run(controller(), 2000) >= 0.97 * best_rate(0.0, table())


def test_a_useless_draft_whose_probes_are_long_costs_less_than_three_percent():
    """As where a drafter has to read many tokens, for a target whose steps are short."""
    ours = world(0.0)
    ours.draft_slow = 10.0
    assert ours.run(controller(), 6000) >= 0.97 * best_rate(0.0, table())


def test_it_rests_while_nothing_is_drafted():
    ours, resting = world(0.0), controller(GoodputConfig(probe_share=1e-4))
    ours.run(resting, 500)
    _, num_steps, is_observed = resting.decide(ours.states(), CAPACITY)
    assert (num_steps, is_observed) == (64, False)
    drafting = world(0.9)
    drafting.run(always := controller(), 50)
    _, num_steps, is_observed = always.decide(drafting.states(), CAPACITY)
    assert num_steps <= 8
    assert is_observed


def test_the_plain_step_before_a_rest_is_cold_if_a_draft_came_before():
    """It counts for the costs of plain steps only after four others."""
    ours, resting = world(0.0), controller()
    ours.run(resting, 1000)
    probes = [at for at, record in enumerate(ours.records) if record.k_budget]
    assert probes[-1] > 500
    plain = resting.costs.times(OperatingPoint.of(ours.states()))["d"].plain_s
    for _ in range(400):
        cold = ours.records[-1].k_budget > 0 and ours.decisions.num_left == 0
        ours.slow = 5.0 if cold else 1.0
        ours.step(resting)
    assert sum(record.k_budget > 0 for record in ours.records[1000:])
    now = resting.costs.times(OperatingPoint.of(ours.states()))["d"].plain_s
    assert now == pytest.approx(plain, rel=0.03)


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
    ours.run(fitted, 400)
    fresh = replace(STATE, request_id="new")
    (plan,) = fitted.decide([fresh], CAPACITY).plans
    assert plan.num_speculative_tokens <= 1
    (other,) = fitted.decide([replace(fresh, request_id="other", tags=("code",))], CAPACITY).plans
    assert other.num_speculative_tokens > 2  # nothing is known of it


def test_the_better_drafter_is_found_and_lost():
    def acceptance(method, name, step):
        return 0.85 if (method == "d") == (step < 500) else 0.3

    costs, early, late = table(), [], []
    for seed in range(7):
        ours = World(acceptance, {"d": costs, "e": costs}, seed=seed)
        ours.run(GoodputController({"d": Tables(costs), "e": Tables(costs)}, 8), 1000)
        methods = [record.method for record in ours.records]
        early.append(methods[300:500].count("d") / 200)
        late.append(methods[700:].count("e") / 300)
    assert min(early) > 0.9
    assert median(late) > 0.9


@pytest.mark.parametrize("told", [0.1, 4.0])
def test_probes_of_another_drafter_lose_at_most_the_share_for_probes(told):
    """Its table may promise less than it takes."""
    num_steps, share = 4000, GoodputConfig().probe_share
    ours = World(
        lambda method, *_: 0.85 if method == "d" else 0.3, {"d": table(), "e": table(draft=4.0)}
    )
    fitted = GoodputController({"d": Tables(table()), "e": Tables(table(draft=told))}, 8)
    ours.run(fitted, 300)
    ours.records.clear()
    ours.run(fitted, num_steps)
    others = [record for record in ours.records if record.method == "e"]
    assert 2 <= len(others) <= 2 + share * num_steps
    mine = [record for record in ours.records if record.method == "d"]
    assert len(mine) >= (1 - 2 * share) * num_steps


def test_a_probe_of_another_drafter_is_one_token():
    costs = {"d": table(), "e": table()}
    ours = World(lambda method, *_: 0.85 if method == "d" else 0.3, costs)
    ours.run(GoodputController({name: Tables(costs[name]) for name in costs}, 8), 1000)
    others = [record.k_budget for record in ours.records[200:] if record.method == "e"]
    assert others
    assert set(others) == {1}


def test_one_token_more_than_the_best_is_explored():
    ours, fitted = world(0.6), controller()
    ours.run(fitted, 300)
    depths = []
    for _ in range(300):
        ours.step(fitted)
        (plan,), (best,) = fitted._active.plans, fitted._active.best
        if plan.probe:
            depths.append(plan.shape.depth - best.shape.depth)
    assert depths
    assert set(depths) == {1}


def test_plans_are_reused_for_longer_while_the_best_stay_the_same():
    ours, fitted = world(0.85), controller()
    previous, longest = None, 0
    for _ in range(400):
        ours.step(fitted)
        active = fitted._active
        if previous is not None and active is not previous:
            same = active.best == previous.best
            assert active.reuse == (min(8, 2 * previous.reuse) if same else 1)
        previous, longest = active, max(longest, active.reuse)
    assert longest == 8


def test_steps_that_take_longer_than_the_table_says_change_the_choice():
    """The table promises cheap drafts; they are dear."""
    ours = World(lambda *_: 0.5, {"d": table(draft=0.6)}, noise=0.05)
    ours.run(controller(draft=0.02), 800)
    assert sum(record.k_budget for record in ours.records[-200:]) < 2 * 200


def test_nobody_to_decide_for():
    assert controller().decide([], Capacity(max_rows=8)).plans == ()


def test_a_wrong_table_costs_little():
    """Drafts cost ten times what the table says."""
    ours = world(0.5, draft=0.5, row=0.1)
    assert ours.run(controller(draft=0.05), 1500) > 0.95 * best_rate(0.0, table())


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_it_is_not_slower_than_plain_decoding(alpha):
    assert world(alpha).run(controller(), 2000) >= 0.97 * best_rate(0.0, table())


def test_plain_steps_are_measured_while_a_draft_pays():
    """The last ones of a run count, because the first ones find cold caches."""
    config = GoodputConfig()
    ours = world(0.8)
    ours.run(controller(), 3000)
    plain = [record.step for record in ours.records if record.k_budget == 0]
    run = 2 * config.num_cold
    assert len(plain) % run == 0
    assert run <= len(plain) <= run + config.probe_share * 3000
    assert plain[run - 1] - plain[0] == run - 1


def test_a_plain_step_that_is_faster_than_its_table_ends_drafts_that_do_not_pay():
    honest = table()
    lines = tuple(replace(line, plain_s=2 * line.plain_s) for line in honest.lines)
    fitted = GoodputController({"d": Tables(replace(honest, lines=lines))}, 8)
    ours = world(0.1)
    ours.run(fitted, 1000)
    assert sum(record.k_budget > 0 for record in ours.records[200:]) < 0.1 * 800


def test_records_are_read_in_the_step_that_they_describe():
    """They may be views of requests, as those of the simulator are."""
    ours, fitted = world(0.9), controller()
    ours.run(fitted, 100)
    for _ in range(20):
        (plan,) = fitted.decide(ours.states(), CAPACITY).plans
        records = [ours.record("r", plan, 0.001, 0.01, 0.001)]
        fitted.observe(records)
        records.clear()


def test_steps_beside_a_prefill_teach_no_costs():
    ours, fitted = world(0.0), controller()
    before = fitted.costs.times(OperatingPoint.of(ours.states()))["d"]
    for _ in range(50):
        (plan,) = fitted.decide(ours.states(), CAPACITY).plans
        record = ours.record("r", plan, 1.0, 1.0, 1.0)
        fitted.observe([changed(record, num_prefill_rows=4)])
    assert fitted.costs.times(OperatingPoint.of(ours.states()))["d"] == before
