from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from tests.unit.measure.judge.judgements import K, figures, judged

from forerun.align.results import build_judgement
from forerun.theory.cost import CostLine, CostTable
from forerun.theory.intervals import bootstrap_ratio


def table(*verify_s, draft_s=0.1, error_s=0.0):
    """Plain steps of one second; pass i + 1 verifies i drafted tokens."""
    line = CostLine(
        rows=tuple(range(1, len(verify_s) + 1)),
        verify_s=verify_s,
        verify_error_s=(error_s,) * len(verify_s),
        plain_s=1.0,
        draft_s=draft_s,
    )
    return CostTable(lines=(line,))


def test_figures_are_ratios_of_sums_over_prompts():
    prompts = [judged([3, 0, 1], alphas=(1.0, 0.5)), judged([2], alphas=(0.0,)), judged([0, 0])]
    overall = figures(prompts).overall
    assert overall.num_steps == 6
    assert overall.acceptance_length == bootstrap_ratio([7, 3, 2], [3, 1, 2], seed=0)
    assert overall.acceptance_length.estimate == 2.0
    assert overall.acceptance_rate_per_position[1] == bootstrap_ratio([1, 1, 0], [3, 1, 2], seed=0)
    assert [b.estimate for b in overall.acceptance_rate_per_position] == [3 / 6, 2 / 6, 1 / 6]
    assert overall.acceptance_probability == bootstrap_ratio([1.5, 0.0], [2, 1], seed=0)
    assert overall.speedup is None


def test_tau_is_one_more_than_the_sum_of_beta():
    overall = figures([judged([3, 0, 1]), judged([2, 2, 3, 0])]).overall
    betas = [beta.estimate for beta in overall.acceptance_rate_per_position]
    assert overall.acceptance_length.estimate == pytest.approx(1 + sum(betas))


def test_one_prompt_alone_says_nothing_about_others():
    found = figures([judged([3, 0], tag="a", alphas=(0.5,)), judged([1], tag="b")]).by_tag["a"]
    assert found.acceptance_length.estimate == 2.5
    assert (found.acceptance_length.low, found.acceptance_length.high) == (1.0, K + 1)
    assert (found.acceptance_probability.low, found.acceptance_probability.high) == (0.0, 1.0)


def test_prompts_without_a_step_count_nowhere():
    prompts = [judged([3, 0, 1]), judged([2, 1])]
    with_empty = figures([*prompts, judged([])]).overall
    assert with_empty.acceptance_length == figures(prompts).overall.acceptance_length
    nothing = figures([judged([]), judged([])], costs=table(1.0, 1.0)).overall
    assert (nothing.acceptance_length, nothing.speedup) == (None, None)
    assert nothing.acceptance_rate_per_position == ()


def test_positions_a_drafter_left_out_are_unobserved():
    shallow = judged([1, 0], k=1)
    overall = figures([judged([3, 0]), shallow]).overall
    assert overall.acceptance_rate_per_position[0].estimate == 2 / 4
    assert overall.acceptance_rate_per_position[1].estimate == 1 / 2


def test_speedup_is_tau_over_kappa_at_every_k():
    prompts = [judged([3, 0, 1]), judged([2, 2, 3, 0])]
    speedup = figures(prompts, costs=table(1.0, 1.1, 1.2, 1.3)).overall.speedup
    taus = [(7 + 5) / 7, (7 + 5 + 4) / 7, (7 + 5 + 4 + 2) / 7]
    kappas = [1.2, 1.4, 1.6]
    found = [interval.estimate for interval in speedup.per_k]
    assert found == pytest.approx([tau / kappa for tau, kappa in zip(taus, kappas, strict=True)])
    assert speedup.num_speculative_tokens == 2


def test_a_draft_that_costs_more_than_it_saves_is_left_alone():
    speedup = figures([judged([0, 1]), judged([0, 0])], costs=table(1.0, 1.5, 2.0, 2.5)).overall
    assert speedup.speedup.num_speculative_tokens == 0
    assert speedup.speedup.best.estimate == 1.0


def test_drafts_that_do_not_pay_yet_are_ranked_all_the_same():
    costs = table(1.0, 1.5, 2.0, 2.5)
    worse, better = (figures([judged([0, n]), judged([0])], costs=costs) for n in (0, 1))
    first, second = worse.overall.speedup, better.overall.speedup
    assert first.best == second.best
    assert first.best_drafting < second.best_drafting < 1.0


def test_without_a_cost_table_tau_ranks():
    drafts = [figures([judged([]), judged([])]), figures([judged([0, 3]), judged([0])])]
    worths = [build_judgement(0, draft, 1.0).worth for draft in drafts]
    assert worths == [(0.0, 1.0), (0.0, 2.0)]


def test_the_best_k_is_scored_on_prompts_that_did_not_choose_it():
    """Prompts of even index accept all, the others nothing: each half chooses the other's worst."""
    prompts = [judged([3, 3] if i % 2 == 0 else [1, 1]) for i in range(8)]
    speedup = figures(prompts, costs=table(1.0, 1.0, 1.0, 1.0, draft_s=0.4)).overall.speedup
    assert speedup.num_speculative_tokens == 1
    assert speedup.per_k[2].estimate == pytest.approx(3 / 2.2)
    # even prompts at K = 1 (tau 2, kappa 1.4), odd ones at K = 3 (tau 2, kappa 2.2)
    assert speedup.best.estimate == pytest.approx(4 / 3.6)


def test_at_the_best_k_nothing_is_slower_than_plain_decoding():
    """Each half chooses the other's worst, so that what was chosen is slower than K = 0."""
    prompts = [judged([3, 3] if i % 2 == 0 else [0, 0]) for i in range(8)]
    speedup = figures(prompts, costs=table(1.0, 1.0, 1.0, 1.0, draft_s=0.4)).overall.speedup
    assert speedup.per_k[2].estimate == pytest.approx(2.5 / 2.2)
    assert (speedup.num_speculative_tokens, speedup.best.estimate) == (0, 1.0)


def test_the_interval_spans_that_of_the_table():
    prompts = [judged([3, 0, 1]), judged([2, 2, 3, 0])]
    sure, rough, useless = (
        figures(prompts, costs=table(1.0, 1.1, 1.2, 1.3, error_s=error)).overall.speedup
        for error in (0.0, 0.2, 2.0)
    )
    assert rough.best.estimate == sure.best.estimate
    below = math.hypot(1 - sure.best.low / sure.best.estimate, 1 - 1.4 / 1.6)
    above = math.hypot(sure.best.high / sure.best.estimate - 1, 1.4 / 1.2 - 1)
    assert rough.best.low == pytest.approx(sure.best.estimate * (1 - below))
    assert rough.best.high == pytest.approx(sure.best.estimate * (1 + above))
    assert useless is None


def test_figures_go_to_json_by_name():
    written = json.loads(json.dumps(figures([judged([3], tag="a"), judged([0])]).to_dict()))
    assert set(written["by_tag"]) == {"", "a"}
    assert written["overall"]["acceptance_length"]["estimate"] == 2.5
    assert "prompts" not in written


def test_looping_is_reported():
    prompts = [replace(judged([1]), looped=True, distinct_4gram_share=0.5), judged([2])]
    overall = figures(prompts).overall
    assert (overall.looped_share, overall.distinct_4gram_share) == (0.5, 0.75)
