"""Every cause is well formed, reachable from its own evidence, and told apart from the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forerun.doctor.diagnosis import (
    CAUSES,
    EXPERIMENTS,
    Cause,
    Sign,
    diagnose,
    experiment_for,
    score_causes,
)
from forerun.doctor.evidence import FACTS, GROUPS, Evidence

ROOT = Path(__file__).parents[3]
LABELS = set(
    """
    measurement_artifact metric_definition_mismatch unrepresentative_benchmark
    speculation_not_engaged degenerate_output_inflation low_alignment domain_shift
    prompt_format_mismatch stale_draft high_entropy_workload tokenizer_mismatch
    draft_context_overflow precision_mismatch sampling_mismatch_q suboptimal_accept_rule
    biased_accept_rule grammar_constraint_conflict kv_position_misalignment
    recurrent_state_rollback draft_input_feature_mismatch draft_weights_misloaded
    kernel_or_metadata_bug drafter_state_loss draft_too_slow draft_placement_or_tp k_too_large
    k_too_small verify_not_parallel compute_bound_batch moe_expert_loading long_context_kv_cost
    graphs_missing_or_launch_bound engine_overhead memory_pressure_or_cache_loss
    prefill_dominated adaptive_policy_pathology numerical_nondeterminism recorded_graph_width
    thermal_or_power_throttling healthy
    """.split()
)
PROBLEMS = [cause for cause in CAUSES.values() if cause.label != "healthy"]


def test_every_label_is_there():
    assert set(CAUSES) == LABELS


@pytest.mark.parametrize("cause", CAUSES.values(), ids=list(CAUSES))
def test_a_cause_is_well_formed(cause: Cause):
    assert len(cause.remedies) >= 2 and all(r.change and r.price for r in cause.remedies)
    for sign in cause.signs:
        kind = FACTS[sign.fact]
        assert (sign.ramp is not None) == (kind.type == "number"), sign.fact
        assert (sign.word is not None) == (kind.type in ("word", "words")), sign.fact
        assert sign.ramp is None or sign.ramp[0] != sign.ramp[1]
    keys = [(sign.fact, sign.word) for sign in cause.signs]
    assert len(keys) == len(set(keys))


def strongest(sign: Sign) -> object:
    """The value of a fact that speaks most for a cause."""
    assert sign.yes > 0.0
    if sign.word is not None:
        return sign.word
    return True if sign.ramp is None else sign.ramp[1]


@pytest.mark.parametrize("cause", PROBLEMS, ids=lambda cause: cause.label)
def test_its_own_evidence_puts_a_cause_first(cause: Cause):
    evidence = Evidence()
    signs = sorted((s for s in cause.signs if s.yes >= 0.5), key=lambda sign: -sign.yes)
    for sign in signs[:4]:
        if sign.fact not in evidence:
            evidence.add(sign.fact, strongest(sign), "test")
    assert score_causes(evidence, CAUSES.values())[0].cause is cause


@pytest.mark.parametrize("cause", PROBLEMS, ids=lambda cause: cause.label)
def test_evidence_against_takes_it_back(cause: Cause):
    evidence = Evidence()
    before = {item.cause.label: item.score for item in score_causes(evidence, CAUSES.values())}
    for sign in cause.signs:
        least = min(sign.yes, sign.no)
        if least < 0.0 and sign.fact not in evidence and sign.word is None:
            at = 1 if sign.yes == least else 0
            evidence.add(sign.fact, bool(at) if sign.ramp is None else sign.ramp[at], "test")
    after = {item.cause.label: item for item in score_causes(evidence, CAUSES.values())}
    assert after[cause.label].score < before[cause.label]
    assert not after[cause.label].evidence_for


def test_experiments_yield_facts_that_exist_and_matter():
    used = {sign.fact for cause in CAUSES.values() for sign in cause.signs}
    for item in EXPERIMENTS:
        assert set(item.yields) <= set(FACTS)
        assert used & set(item.yields), item.name
    assert len({item.name for item in EXPERIMENTS}) == len(EXPERIMENTS)


@pytest.mark.parametrize("cause", PROBLEMS, ids=lambda cause: cause.label)
def test_every_cause_has_a_test_that_would_decide_it(cause: Cause):
    found = experiment_for(cause, Evidence())
    strong = {s.fact for s in cause.signs if s.spread >= 1.0}
    assert found is not None and strong & set(found.yields)


def test_scores_leave_a_share_to_unlisted_causes():
    evidence = Evidence()
    assert sum(s.score for s in score_causes(evidence, CAUSES.values())) < 0.1
    evidence.add("vocabularies_differ", True, "test")
    assert 0.8 < sum(s.score for s in score_causes(evidence, CAUSES.values())) < 1.0


def test_nothing_known_is_inconclusive_and_names_a_cheap_test():
    found = diagnose(Evidence())
    assert found.verdict == "inconclusive" and not found.causes
    assert found.next_test is not None and found.next_test.minutes <= 5


def test_a_derived_figure_is_no_experiment_of_its_own():
    derived = {kind.name for kind in GROUPS["derived"]}
    assert all(set(item.yields) - derived for item in EXPERIMENTS)


def test_the_page_and_the_schema_are_current():
    command = [sys.executable, ROOT / "recipes" / "docs" / "causes.py", "--check"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
