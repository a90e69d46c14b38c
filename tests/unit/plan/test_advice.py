"""Plans over small tables whose optimum is found by hand or by trying everything."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from forerun.errors import InvalidProfile, InvalidRequest
from forerun.plan.acceptance import given
from forerun.plan.advice import DraftCandidate, PlanConfig, advise, option_at
from forerun.theory.cost import CostLine, CostTable
from forerun.theory.speedup import constant_acceptance_length

ONE = CostLine(
    rows=tuple(range(1, 18)),
    verify_s=tuple(0.010 + 0.0002 * n for n in range(17)),
    plain_s=0.010,
    draft_s=0.0005,
    overhead_s=(0.0005,),
)
EIGHT = replace(ONE, batch=8, verify_s=tuple(0.012 + 0.010 * n for n in range(17)), plain_s=0.012)
TABLE = CostTable(lines=(ONE, EIGHT))
CONFIG = PlanConfig(batches=(1, 8), context=0)


def candidate(name="d", alpha=0.8, table=TABLE, max_k=16):
    return DraftCandidate(
        name=name, table=table, acceptance=given([alpha], conditional=False, max_k=max_k)
    )


def test_an_option_is_tau_over_kappa():
    found = option_at(candidate(), 4, batch=1, context=0)
    tau = constant_acceptance_length(0.8, 4)
    cycle_s = 4 * 0.0005 + 0.0108 + 0.0005
    assert found.speedup.estimate == pytest.approx(tau * 0.010 / cycle_s)
    assert found.tpot_s == pytest.approx(cycle_s / tau)
    assert found.tokens_per_s == pytest.approx(tau / cycle_s)


def test_the_interval_joins_costs_and_acceptance():
    rough = CostTable(lines=(replace(ONE, plain_error_s=0.001),))
    found = option_at(candidate(table=rough), 4, batch=1, context=0)
    kappa = found.cycle_cost
    tau = found.acceptance_length.estimate
    assert found.speedup.low == pytest.approx(tau / kappa.high)
    assert found.speedup.high == pytest.approx(tau / kappa.low)


def test_the_best_is_the_best_of_everything():
    drafts = [candidate("slow", 0.9, CostTable(lines=(replace(ONE, draft_s=0.004),)))]
    drafts.append(candidate("fast", 0.7, CostTable(lines=(ONE,))))
    config = PlanConfig(batches=(1,), context=0)
    everything = [
        option_at(d, k, batch=1, context=0) for d, k in product(drafts, range(config.max_k + 1))
    ]
    best = max(everything, key=lambda option: option.tokens_per_s)
    assert advise(drafts, config).best == best
    assert best.draft == "fast"


def test_batches_are_judged_by_throughput_and_one_by_one():
    found = advise([candidate()], CONFIG)
    assert [option.batch for option in found.per_batch] == [1, 8]
    assert not found.per_batch[0].is_plain
    assert found.per_batch[1].is_plain  # each row costs five sixths of a plain step
    assert found.best == found.per_batch[1]


def test_a_promise_on_latency_takes_the_highest_throughput_that_keeps_it():
    found = advise([candidate()], replace(CONFIG, slo_tpot_s=0.005))
    assert found.best.batch == 1
    assert found.best.tpot_s <= 0.005
    assert "below the plain step of 10 ms" in found.remarks[0]


def test_a_time_equal_to_the_limit_on_latency_keeps_it():
    fastest = advise([candidate()], CONFIG).per_batch[0]
    found = advise([candidate()], replace(CONFIG, slo_tpot_s=fastest.tpot_s))
    assert found.best == fastest


def test_a_promise_nothing_keeps_is_refused_with_what_there_is():
    with pytest.raises(InvalidRequest, match=r"1 ms .* plain step takes 10 ms .*d at K=\d+\) \d"):
        advise([candidate()], replace(CONFIG, slo_tpot_s=0.001))


def test_a_useless_draft_is_not_used():
    found = advise([candidate(alpha=0.0)], PlanConfig(batches=(1,), context=0))
    assert found.best.is_plain
    assert found.best.draft is None
    (name, limits) = found.break_even[0]
    assert (name, limits.num_speculative_tokens) == ("d", 1)
    assert limits.draft_cost < 0


def test_at_break_even_nothing_is_gained():
    found = advise([candidate(alpha=0.5)], PlanConfig(batches=(1,), context=0))
    _, limits = found.break_even[0]
    k = limits.num_speculative_tokens
    even = candidate(alpha=limits.acceptance_probability)
    assert option_at(even, k, batch=1, context=0).speedup.estimate == pytest.approx(1.0)
    dearer = CostTable(lines=(replace(ONE, draft_s=0.010 * limits.draft_cost),))
    slow = candidate(alpha=0.5, table=dearer)
    assert option_at(slow, k, batch=1, context=0).speedup.estimate == pytest.approx(1.0)
    assert 1 + limits.draft_acceptance_rate * k == pytest.approx(
        option_at(candidate(), k, batch=1, context=0).cycle_cost.estimate
    )


def test_acceptance_that_ends_early_is_said():
    short = replace(candidate(), acceptance=given([0.9, 0.85], conditional=False, max_k=16))
    found = advise([short], PlanConfig(batches=(1,), context=0))
    assert found.best.num_speculative_tokens == 2
    assert any("known for 2 positions only" in remark for remark in found.remarks)


def test_what_was_not_measured_is_said():
    found = advise([candidate()], PlanConfig(batches=(16,), context=500))
    assert any("beyond the 8 measured" in remark for remark in found.remarks)
    assert any("context 500 is beyond 0" in remark for remark in found.remarks)


def test_a_profile_too_rough_to_bound_a_speedup_is_refused():
    rough = CostTable(lines=(replace(ONE, draft_error_s=0.1),))
    with pytest.raises(InvalidProfile, match=r"too rough at batch 1.*--num-speculative-tokens"):
        advise([candidate(table=rough)], PlanConfig(batches=(1,), context=0))


def test_a_plan_without_drafters_is_refused():
    with pytest.raises(InvalidRequest, match="none is given"):
        advise([], CONFIG)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches": ()}, "batches is"),
        ({"batches": (8, 1)}, "must ascend"),
        ({"batches": (0, 1)}, "from 1 or more"),
        ({"context": -1}, "context is -1"),
        ({"max_k": 0}, "max_k is 0"),
        ({"slo_tpot_s": 0.0}, "slo_tpot_s is 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
    with pytest.raises(InvalidRequest, match=message):
        replace(CONFIG, **changes)


def test_beyond_the_measured_batch_what_is_planned_is_what_is_advised():
    config = PlanConfig(batches=(8, 64), context=0)
    ours = [candidate(alpha=0.6)]
    best = advise(ours, config).best
    assert best.batch == 64


def test_too_rough_far_out_says_how_far_was_measured():
    lines = tuple(
        replace(ONE, context=context, plain_error_s=error)
        for context, error in ((64, 0.0001), (512, 0.02))
    )
    with pytest.raises(InvalidProfile, match="context 8192 is beyond the 512 it measured"):
        option_at(candidate(table=CostTable(lines=lines)), 16, batch=1, context=8192)
