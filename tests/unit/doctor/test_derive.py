"""Figures that follow from others, worked out by hand."""

from __future__ import annotations

import pytest

from forerun.doctor.diagnosis import derive
from forerun.doctor.evidence import Evidence
from forerun.theory.intervals import Interval, wilson_interval


def derived(**facts: object) -> Evidence:
    evidence = Evidence()
    for name, value in facts.items():
        evidence.add(name, value, "test")
    return derive(evidence)


def test_counts_give_rates_with_intervals():
    found = derived(
        num_drafts=100,
        num_drafted=300,
        num_accepted=120,
        accepted_per_position=[70, 40, 10],
        drafted_per_position=[100, 100, 100],
    )
    assert found.number("acceptance_length") == 2.2
    assert found.number("draft_acceptance_rate") == 0.4
    assert found.facts["draft_acceptance_rate"].interval == wilson_interval(120, 300)
    assert found.numbers("acceptance_rate_per_position") == (0.7, 0.4, 0.1)
    assert found.facts["alpha_1"].interval == wilson_interval(70, 100)
    assert found.number("k") == 3
    # E[a^2] = 0.7 + 3 x 0.4 + 5 x 0.1 = 2.4; variance 2.4 - 1.2^2 = 0.96.
    reach = 1.959964 * (0.96 / 100) ** 0.5
    interval = found.facts["acceptance_length"].interval
    assert interval is not None and interval.high == pytest.approx(2.2 + reach)
    assert found.numbers("conditional_acceptance_per_position") == pytest.approx(
        (0.7, 4 / 7, 1 / 4)
    )
    assert found.number("later_over_first") == pytest.approx((1 / 4) / 0.7)


def test_a_position_few_reached_does_not_count_as_a_cliff():
    found = derived(num_drafts=100, accepted_per_position=[90, 5, 0])
    assert found.number("later_over_first") == pytest.approx((5 / 90) / 0.9)


def test_a_position_few_steps_drafted_does_not_count_as_a_cliff():
    """A controller that drafts one token as a rule tried six in two steps."""
    counts = {"num_drafts": 2000, "accepted_per_position": [1200, 60, 30, 16, 6, 0]}
    found = derived(**counts, drafted_per_position=[2000, 120, 70, 50, 30, 2])
    assert found.number("later_over_first") == pytest.approx((16 / 50) / (30 / 70) / 0.6)


@pytest.mark.parametrize(("num_steps", "kappa"), [(1050, 3.0 / 1.5), (3000, None)])
def test_kappa_of_drafting_steps_does_not_follow_from_the_speed_of_many_plain_ones(
    num_steps, kappa
):
    counts = {"num_drafts": 1000, "num_drafted": 4000, "num_accepted": 2000}
    found = derived(**counts, num_steps=num_steps, speedup=1.5)
    assert found.number("cycle_cost") == kappa


@pytest.mark.parametrize(
    ("facts", "tau"),
    [
        ({"draft_acceptance_rate": 0.5, "k": 4}, 3.0),
        ({"acceptance_rate_per_position": [0.8, 0.4]}, 2.2),
    ],
)
def test_tau_from_whatever_there_is(facts: dict[str, object], tau: float):
    assert derived(**facts).number("acceptance_length") == pytest.approx(tau)


def test_rate_from_tau_takes_the_bonus_token_off():
    assert derived(acceptance_length=3.0, k=4).number("draft_acceptance_rate") == 0.5


def test_drafts_that_end_early_are_shorter():
    found = derived(acceptance_length=3.8, draft_acceptance_rate=0.9, k=16)
    assert found.number("mean_drafted") == pytest.approx(2.8 / 0.9)
    assert found.number("length_over_ceiling") == pytest.approx(3.8 / (2.8 / 0.9 + 1))


def test_two_rates_and_tau_give_kappa():
    found = derived(acceptance_length=2.0, k=4, tokens_per_s=50, tokens_per_s_plain=40)
    assert found.number("speedup") == 1.25
    assert found.number("cycle_cost") == pytest.approx(1.6)
    assert found.flag("slower_than_plain") is False and found.flag("no_gain") is False


def test_timers_give_the_parts():
    found = derived(
        **{"k": 4, "acceptance_length": 2.5, "batch": 2},
        **{"plain_step_s": 0.01, "cycle_s": 0.02, "draft_s": 0.006, "verify_s": 0.012},
        other_s=0.002,
    )
    assert found.number("cycle_cost") == pytest.approx(2.0)
    assert found.number("draft_cost") == pytest.approx(0.15)
    assert found.number("verify_cost") == pytest.approx(1.2)
    assert found.number("verify_linearity") == pytest.approx(0.05)
    assert found.number("rows") == 10
    assert found.number("speedup") == pytest.approx(1.25)


def test_a_timed_draft_leaves_the_rest_to_the_pass():
    found = derived(
        acceptance_length=6.0, k=10, tokens_per_s=10, tokens_per_s_plain=10, draft_token_s=0.01
    )
    assert found.number("draft_cost") == pytest.approx(0.1)
    assert found.number("verify_cost") == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("target_moe", {"target_name": "Qwen3-30B-A3B"}),
        ("target_quantised", {"target_name": "Llama-3-8B Q4_K_M"}),
        ("target_recurrent", {"target_name": "some-Mamba-7B"}),
        ("draft_quantised", {"draft_name": "draft-0.5B-AWQ"}),
        ("vocabularies_differ", {"target_vocab_size": 152064, "draft_vocab_size": 32000}),
        ("acceptance_zero", {"num_drafts": 1000, "num_drafted": 4000, "num_accepted": 3}),
        ("drafts_absent", {"num_drafts": 0, "num_steps": 500}),
        ("acceptance_low", {"acceptance_rate_per_position": [0.3, 0.1]}),
        ("acceptance_low", {"draft_acceptance_rate": 0.1}),
        ("acceptance_fine", {"draft_acceptance_rate": 0.8}),
        ("slower_than_plain", {"tokens_per_s": 40, "tokens_per_s_plain": 50}),
        ("slowed_down", {"tokens_per_s": 40, "tokens_per_s_before": 50}),
        ("tools_disagree", {"tokens_per_s_client": 10, "tokens_per_s_server": 30}),
        ("ttft_up", {"ttft_s": 1.5, "ttft_s_plain": 1.0}),
        ("cache_hits_lower", {"prefix_hit_rate": 0.8, "prefix_hit_rate_plain": 0.95}),
        ("memory_pressure", {"num_preemptions": 3}),
        ("graphs_off", {"graph_hit_share": 0.1}),
        ("slow_without_drafts", {"tokens_per_s_plain": 100, "tokens_per_s_k0": 90}),
        ("outputs_short", {"num_prompt_tokens": 4000, "num_output_tokens": 10}),
        ("acceptance_above_expected", {"calibration": 1.2}),
        ("draft_share_high", {"cycle_s": 1.0, "draft_s": 0.6}),
    ],
)
def test_observations_read_off_figures(name: str, facts: dict[str, object]):
    assert derived(**facts).flag(name) is True


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("acceptance_zero", {"num_drafts": 10, "num_drafted": 40, "num_accepted": 0}),
        ("vocabularies_differ", {"target_vocab_size": 152064, "draft_vocab_size": 151936}),
        ("drafts_absent", {"num_drafts": 0, "num_steps": 3}),
        ("acceptance_low", {"acceptance_rate_per_position": [0.5]}),
    ],
)
def test_too_little_gives_no_observation(name: str, facts: dict[str, object]):
    assert derived(**facts).flag(name) is None


def test_an_interval_across_the_threshold_gives_no_observation():
    evidence = Evidence()
    evidence.add("calibration", 1.1, "t", Interval(estimate=1.1, low=0.9, high=1.3))
    assert derive(evidence).flag("acceptance_above_expected") is None


def test_what_somebody_saw_stays():
    assert (
        derived(acceptance_low=False, acceptance_rate_per_position=[0.1]).flag("acceptance_low")
        is False
    )


def test_active_parameters_decide_for_experts():
    found = derived(target_name="Big-235B-A22B", draft_name="small-1.1B")
    assert found.number("target_parameters") == 22.0
    assert found.number("draft_size_ratio") == pytest.approx(0.05)


BATCH = {"k": 4, "batch": 8, "acceptance_length": 2.6, "cycle_cost": 3.4, "draft_cost": 0.08}


def test_rows_are_many_by_device():
    assert derived(**BATCH, device="cuda:0").number("rows_over_free") == 40 / 128
    assert derived(**BATCH, device="cpu, 2 cores").number("rows_over_free") == 40 / 16
    assert derived(**BATCH).number("rows_over_free") == 40 / 128


def test_what_the_batch_explains_of_a_pass():
    # 40 rows against 8, each 0.1 of one sequence's step: 4.9 / 1.7.
    found = derived(**BATCH, verify_cost=2.0, batch_linearity=0.1)
    assert found.number("verify_over_batch") == pytest.approx(1.0 / (4.9 / 1.7 - 1.0))
    alone = derived(**{**BATCH, "batch": 1}, verify_cost=2.0, batch_linearity=0.1)
    assert "verify_over_batch" not in alone
    free = derived(**BATCH, verify_cost=2.0, batch_linearity=0.0)
    assert free.number("verify_over_batch") == pytest.approx(1.0 / 0.05)
