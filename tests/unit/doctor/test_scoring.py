"""Scores at their breakpoints: what supports a cause, what speaks against it, and how much.

The two tables are written by hand and independent of the weights: a weight that is changed by
mistake makes a decisive fact indecisive.
"""

from __future__ import annotations

import math
import re

import pytest

from forerun.doctor.diagnosis import (
    ANY_OTHER,
    CAUSES,
    EXPERIMENTS,
    MIN_ALSO,
    MIN_SUPPORT,
    Cause,
    Finding,
    Remedy,
    ScoredCause,
    Sign,
    best_experiment,
    experiment_for,
    score_causes,
)
from forerun.doctor.evidence import Evidence, Fact
from forerun.theory.intervals import Interval


def entries(text: str) -> list[tuple[str, str, object]]:
    """(cause, fact, value) of every entry of a table."""
    found: list[tuple[str, str, object]] = []
    label = ""
    for token in text.split():
        if token.endswith(":"):
            label = token[:-1]
            continue
        fact, _, value = token.partition("=")
        plain: object = {"yes": True, "no": False}.get(value, value)
        if isinstance(plain, str) and re.fullmatch(r"[0-9.]+", plain):
            plain = float(plain)
        found.append((label, fact, plain))
    return found


DECISIVE = """
measurement_artifact: tools_disagree=yes client_counts_chunks=yes
metric_definition_mismatch: definitions_differ=yes
unrepresentative_benchmark: random_prompts=yes benchmark_unlike_traffic=yes
speculation_not_engaged: speculation_refused=yes drafts_absent=yes speculation_off=yes
degenerate_output_inflation: output_repetitive=yes
low_alignment: changed=draft undertrained_draft=yes
domain_shift: acceptance_differs_by_domain=yes
prompt_format_mismatch: acceptance_differs_by_template=yes template_differs=yes changed=template
stale_draft: changed=target changed=adapter draft_of_other_target=yes
high_entropy_workload: open_ended_text=yes
tokenizer_mismatch: vocabularies_differ=yes
draft_context_overflow: context_over_window=1.05 context_ratio=0.85
  acceptance_falls_with_context=yes
precision_mismatch: acceptance_differs_by_precision=yes changed=precision
sampling_mismatch_q: draft_probs_differ=yes acceptance_above_expected=yes
suboptimal_accept_rule: exact_match_rule=yes draft_one_hot=yes accept_rule_ratio=0.75
biased_accept_rule: distribution_differs=yes residual_wrong=yes
grammar_constraint_conflict: schema_violations=yes
numerical_nondeterminism: output_differs_at_ties=yes
kv_position_misalignment: rollback_wrong=yes acceptance_falls_after_partial=yes
  acceptance_falls_after_full=yes acceptance_falls_with_generation=yes
  acceptance_falls_with_k=yes acceptance_falls_with_batch=yes replay_accepts_more=yes
  self_draft_rate=0.9 output_differs_after_partial=yes
draft_input_feature_mismatch: features_differ=yes acceptance_below_reference=yes
draft_weights_misloaded: acceptance_zero=yes drawn_share=0.35 weights_incomplete=yes
kernel_or_metadata_bug: acceptance_differs_by_backend=yes acceptance_differs_by_graph=yes
drafter_state_loss: acceptance_falls_after_handoff=yes
draft_too_slow: gap_share_draft=0.45
draft_placement_or_tp: slower_with_tensor_parallel=yes draft_elsewhere=yes
verify_not_parallel: verify_serial=yes verify_linearity=0.5
compute_bound_batch: slower_with_batch=yes
moe_expert_loading: experts_dominate=yes
long_context_kv_cost: slower_with_context=yes
graphs_missing_or_launch_bound: graphs_off=yes rows_over_graph=1.05
engine_overhead: gap_share_overhead=0.45 host_work=yes cost_changed_with_engine=yes
memory_pressure_or_cache_loss: memory_pressure=yes cache_hits_lower=yes
prefill_dominated: prefill_share=0.6 ttft_up=yes
k_too_large: gain_of_lower_k=1.15
k_too_small: gain_of_higher_k=1.3 faster_with_k=yes
adaptive_policy_pathology: adaptive_stuck=yes k_swing=0.9
recorded_graph_width: graph_too_wide=yes
thermal_or_power_throttling: clocks_fall=yes
"""
"""Facts that alone put a cause first with enough support to be named."""
EXCLUDING = """
speculation_not_engaged: drafts_absent=no
degenerate_output_inflation: acceptance_low=yes
low_alignment: acceptance_low=no gain_of_lower_k=1.3 vocabularies_differ=yes drawn_share=0.35
  replay_accepts_more=yes
domain_shift: gap_share_rejection=0.1
prompt_format_mismatch: gap_share_rejection=0.1
stale_draft: unchanged=target gap_share_rejection=0.1
high_entropy_workload: gap_share_rejection=0.1
tokenizer_mismatch: vocabularies_differ=no gap_share_rejection=0.1
draft_context_overflow: context_over_window=0.9 gap_share_rejection=0.1
precision_mismatch: gap_share_rejection=0.1
suboptimal_accept_rule: temperature=0.2 gap_share_rejection=0.1
biased_accept_rule: distribution_differs=no
grammar_constraint_conflict: grammar_used=no
numerical_nondeterminism: output_differs_at_ties=no distribution_differs=yes
kv_position_misalignment: acceptance_falls_after_handoff=yes
recurrent_state_rollback: target_recurrent=no
draft_input_feature_mismatch: method=draft_model method=ngram gap_share_rejection=0.1
draft_weights_misloaded: acceptance_zero=no method=ngram gap_share_rejection=0.1
drafter_state_loss: gap_share_rejection=0.1
draft_too_slow: method=ngram prefill_share=0.8
verify_not_parallel: slower_with_context=yes
k_too_large: faster_with_k=yes acceptance_dropped=yes
adaptive_policy_pathology: adaptive_k=no
degenerate_output_inflation: output_loops_with_speculation=yes
"""
"""Facts that make a cause at least seven times less likely."""


@pytest.mark.parametrize(("label", "fact", "value"), entries(DECISIVE))
def test_a_decisive_fact_is_enough_to_name_its_cause(label, fact, value):
    evidence = Evidence()
    evidence.add(fact, value, "test")
    first = score_causes(evidence, CAUSES.values())[0]
    assert first.cause.label == label and first.is_supported
    assert first.support >= 2.5


@pytest.mark.parametrize(("label", "fact", "value"), entries(EXCLUDING))
def test_an_excluding_fact_speaks_against_its_cause(label, fact, value):
    evidence = Evidence()
    evidence.add(fact, value, "test")
    found = next(s for s in score_causes(evidence, CAUSES.values()) if s.cause.label == label)
    assert sum(finding.weight for finding in found.evidence_against) <= -2.0


def test_no_other_fact_rules_out_or_decides_as_much():
    """The tables are complete, so a weight cannot become decisive unnoticed."""
    strong = {
        (cause.label, sign.fact)
        for cause in CAUSES.values()
        if cause.label != "healthy"
        for sign in cause.signs
        if sign.yes >= 3.5 or sign.no <= -3.5
    }
    listed = {(label, fact) for label, fact, _ in entries(DECISIVE + EXCLUDING)}
    assert strong <= listed


def cause(label: str, *signs: Sign, prior: float = 0.0) -> Cause:
    remedy = Remedy(change="c", price="p", effect="none")
    return Cause(
        label=label,
        family="cost",
        what="",
        why="",
        prior=prior,
        signs=signs,
        remedies=(remedy, remedy),
    )


def finding(weight: float) -> Finding:
    return Finding(fact=Fact(name="k", value=1.0, source="test"), weight=weight)


def scored(prior: float, *weights: float) -> ScoredCause:
    return ScoredCause(
        cause=cause("x", prior=prior),
        score=0.5,
        evidence_for=tuple(finding(w) for w in weights if w > 0),
        evidence_against=tuple(finding(w) for w in weights if w < 0),
    )


@pytest.mark.parametrize(
    ("prior", "weights", "supported"),
    [
        (0.0, (MIN_SUPPORT,), True),
        (0.0, (MIN_SUPPORT - 1e-9,), False),
        (5.0, (MIN_SUPPORT - 1e-9,), False),  # a common cause needs as much evidence as any other
        (5.0, (), False),
        (-0.5, (MIN_SUPPORT + 0.5 + 1e-9,), True),
        (-0.5, (MIN_SUPPORT + 0.4,), False),  # a rare one needs more
        (0.0, (2.0, -1.999), True),
        (0.0, (2.0, -2.0), False),
        (0.0, (2.0, -5.0), False),
        (0.0, (2.0, -1.0, -1.5), False),
    ],
)
def test_support_at_its_breakpoints(prior, weights, supported):
    assert scored(prior, *weights).is_supported is supported


def test_support_beside_another_cause_is_less():
    assert scored(0.0, MIN_ALSO).reaches(MIN_ALSO)
    assert not scored(0.0, MIN_ALSO - 1e-9).reaches(MIN_ALSO)
    assert 0.0 < MIN_ALSO < MIN_SUPPORT


def test_scores_are_the_shares_of_the_likelihood():
    evidence = Evidence()
    evidence.add("graphs_off", True, "test")
    evidence.add("host_work", True, "test")
    found = score_causes(
        evidence,
        [
            cause("a", Sign(fact="graphs_off", yes=3.0), Sign(fact="host_work", yes=-0.5)),
            cause("b", Sign(fact="graphs_off", yes=1.5), prior=0.25),
        ],
    )
    scores = {item.cause.label: item.score for item in found}
    weight_a, weight_b, weight_other = math.exp(2.5), math.exp(1.75), math.exp(ANY_OTHER)
    total = weight_a + weight_b + weight_other
    assert scores == pytest.approx({"a": weight_a / total, "b": weight_b / total})
    first = found[0]
    assert [f.weight for f in first.evidence_for] == [3.0]
    assert [f.weight for f in first.evidence_against] == [-0.5]


def test_the_strongest_evidence_comes_first():
    evidence = Evidence()
    for name in ("graphs_off", "host_work", "device_idle"):
        evidence.add(name, True, "test")
    signs = [
        Sign(fact=name, yes=weight)
        for name, weight in (("graphs_off", 0.5), ("host_work", 2.0), ("device_idle", 1.0))
    ]
    (found,) = score_causes(evidence, [cause("a", *signs)])
    assert [f.weight for f in found.evidence_for] == [2.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("value", "weight"),
    [(0.1, -2.0), (0.2, -2.0), (0.25, -0.5), (0.3, 1.0), (0.4, 4.0), (0.5, 4.0)],
)
@pytest.mark.parametrize("falls", [False, True])
def test_a_ramp_at_its_breakpoints(value, weight, falls):
    """From -2 at 0.2 to 4 at 0.4, and the same downwards."""
    ramp = (0.2, 0.4) if not falls else (0.8, 0.6)
    evidence = Evidence()
    evidence.add("draft_cost", 1.0 - value if falls else value, "test")
    found = Sign(fact="draft_cost", ramp=ramp, yes=4.0, no=-2.0).finding(evidence)
    assert found is not None and found.weight == pytest.approx(weight)


@pytest.mark.parametrize(
    ("interval", "weight"),
    [((0.3, 0.3), 1.0), ((0.2, 0.3), 0.0), ((0.0, 0.9), 1.0), ((0.3, 0.9), 2.0)],
)
def test_a_ramp_takes_the_mean_over_the_interval(interval, weight):
    low, high = interval
    evidence = Evidence()
    evidence.add("draft_cost", 0.3, "test", Interval(estimate=0.3, low=low, high=high))
    found = Sign(fact="draft_cost", ramp=(0.2, 0.4), yes=4.0, no=-2.0).finding(evidence)
    assert found is not None and found.weight == pytest.approx(weight)


@pytest.mark.parametrize(("value", "weight"), [(True, 2.0), (False, -1.0), (None, None)])
def test_an_observation_weighs_as_it_was_answered(value, weight):
    evidence = Evidence()
    evidence.add("graphs_off", value, "test")
    found = Sign(fact="graphs_off", yes=2.0, no=-1.0).finding(evidence)
    assert (None if found is None else found.weight) == weight
    assert Sign(fact="graphs_off", yes=2.0, no=-1.0).spread == 3.0


def test_a_word_among_several_counts():
    evidence = Evidence()
    evidence.add("changed", ["engine", "target"], "test")
    weights = {
        word: Sign(fact="changed", word=word, yes=2.0, no=-1.0).finding(evidence)
        for word in ("target", "draft")
    }
    assert {word: f.weight for word, f in weights.items() if f is not None} == {
        "target": 2.0,
        "draft": -1.0,
    }


def test_a_test_is_chosen_for_what_is_not_known_and_for_its_time():
    names = {item.name: item for item in EXPERIMENTS}
    stale = CAUSES["stale_draft"]
    evidence = Evidence()
    before = experiment_for(stale, evidence)
    assert before is names["what changed"]
    for fact in names["what changed"].yields:
        evidence.add(
            fact, ["target"] if fact == "changed" else 0.5 if "ratio" in fact else True, "t"
        )
    after = experiment_for(stale, evidence)
    assert after is not None and after is not before
    weights = {label: float(label in ("k_too_large", "k_too_small")) / 2 for label in CAUSES}
    between = best_experiment(weights, CAUSES.values(), Evidence())
    assert between is not None
    assert {"gain_of_lower_k", "gain_of_higher_k", "slower_with_k"} & set(between.yields)
    assert best_experiment({}, CAUSES.values(), Evidence()) is None


def test_a_supported_cause_comes_before_a_common_one():
    evidence = Evidence()
    evidence.add("graphs_off", True, "test")
    common = cause("common", prior=5.0)
    shown = cause("shown", Sign(fact="graphs_off", yes=MIN_SUPPORT))
    half = cause("half", Sign(fact="graphs_off", yes=MIN_ALSO), prior=3.0)
    found = score_causes(evidence, [common, half, shown])
    assert [item.cause.label for item in found] == ["shown", "half", "common"]
    assert found[0].score > found[1].score > found[2].score
