from __future__ import annotations

import json

import pytest

from forerun.cli.session import Figures
from forerun.cli.tables import rates
from forerun.theory.record import StepRecord


def step(num_drafted, num_accepted, num_emitted=None):
    return StepRecord(
        cycle_id=0,
        t_s=0.0,
        request_id="r",
        step=1,
        method="draft_model" if num_drafted else "plain",
        k_budget=num_drafted,
        num_drafted=num_drafted,
        depth_drafted=num_drafted,
        num_accepted=num_accepted,
        num_emitted=num_accepted + 1 if num_emitted is None else num_emitted,
        draft_s=0.0,
        verify_s=0.0,
        other_s=0.0,
        batch_rows=num_drafted + 1,
        num_prefill_rows=0,
        context_tokens=10,
        last_token_source="bonus",
        expected_accepted=0.0,
    )


def figures(*records, total_s=2.0, ttft_s=0.5):
    return Figures.of(records, num_prompt_tokens=9, total_s=total_s, ttft_s=ttft_s)


def test_steps_that_drafted_nothing_do_not_dilute_acceptance():
    found = figures(step(0, 0), step(2, 2), step(2, 0))
    assert found.num_tokens == 5
    assert found.acceptance.num_steps == 2
    assert found.acceptance.acceptance_length == 2.0
    assert "2.00 tokens per step, accepted per position .50 .50" in found.line
    assert found.line.endswith(".50 .50 where drafted in 2 2 steps")


def test_a_stop_inside_a_step_counts_what_was_emitted():
    assert figures(step(3, 3, num_emitted=2)).num_tokens == 2


def test_plain_decoding_says_nothing_of_drafts():
    found = figures(step(0, 0), step(0, 0))
    assert found.line == "2 tokens in 2.00 s (1.0/s), first after 0.50 s"
    assert found.to_dict()["acceptance_length"] is None


def test_nothing_yet():
    found = figures(total_s=0.0, ttft_s=None)
    assert found.line == "0 tokens in 0.00 s (0.0/s)"


def test_json():
    content = figures(step(2, 1)).to_dict()
    assert json.loads(json.dumps(content)) == content
    assert content["tokens_per_s"] == 1.0
    assert content["acceptance_rate_per_position"] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("values", "text"), [([], ""), ([1.0, 0.504], "1.00 .50"), ([0.1] * 3, ".10 .10 …")]
)
def test_rates_are_short(values, text):
    assert rates(values, most=2) == text
