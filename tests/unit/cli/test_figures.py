from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from forerun.cli.session import RequestFigures
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
    return RequestFigures.of(records, num_prompt_tokens=9, total_s=total_s, ttft_s=ttft_s)


def test_steps_that_drafted_nothing_do_not_dilute_acceptance():
    found = figures(step(0, 0), step(2, 2), step(2, 0))
    assert found.num_tokens == 5
    assert (found.num_steps, found.num_plain_steps) == (2, 1)
    assert found.acceptance_length.estimate == 2.0
    assert "2.00 tokens per step with a draft, accepted per position .50 .50" in found.details
    assert found.details.endswith(".50 .50 where drafted in 2 2 steps")


def test_a_stop_inside_a_step_counts_what_was_emitted():
    assert figures(step(3, 3, num_emitted=2)).num_tokens == 2


def test_plain_decoding_says_nothing_of_drafts():
    found = figures(step(0, 0), step(0, 0))
    assert found.details == "2 tokens in 2.00 s (1.0/s), first after 0.50 s"
    assert found.sentence == "2 tokens in 2.0 s, 1 a second, by plain decoding"
    assert found.to_dict()["acceptance_length"] is None


def test_nothing_yet():
    found = figures(total_s=0.0, ttft_s=None)
    assert found.details == "0 tokens in 0.00 s (0.0/s)"


def request(plain_s, drafting_s):
    """A prompt, plain steps of these times, then steps that draft 3 tokens and accept 2."""
    prompt = replace(step(0, 0), num_prefill_rows=9, verify_s=1.0)
    plain = [replace(step(0, 0), verify_s=seconds) for seconds in plain_s]
    drafting = [replace(step(3, 2), verify_s=seconds) for seconds in drafting_s]
    return numbered([prompt, *plain, *drafting])


def numbered(records):
    """Every step in a cycle of its own."""
    return [replace(record, cycle_id=number) for number, record in enumerate(records)]


def test_decode_steps_are_compared_with_plain_steps_for_as_many_tokens():
    found = figures(*request([0.1] * 12, [0.15] * 20))
    # 12 plain steps and 20 that emit 3 tokens: 72 tokens in 4.2 s, plain they would take 7.2 s.
    assert found.speedup.estimate == pytest.approx(7.2 / 4.2)
    assert found.speedup.low < found.speedup.estimate < found.speedup.high
    assert "drafted by draft_model: 1.71 times as fast as plain decoding" in found.sentence


def test_plain_steps_of_uneven_time_widen_the_interval():
    found = figures(*request([0.05, 0.15] * 6, [0.15] * 20))
    assert found.speedup.low < 1.4 < 2.0 < found.speedup.high


def test_one_lucky_draft_widens_the_interval():
    unlucky = [replace(step(3, 0), verify_s=0.1)] * 7
    lucky = replace(step(20, 20), verify_s=0.1)
    records = numbered([*(replace(step(0, 0), verify_s=0.1) for _ in range(20)), *unlucky, lucky])
    found = figures(*records).speedup
    assert found.estimate == pytest.approx(4.8 / 2.8)
    assert found.low < 1.0


def test_samples_of_one_request_share_their_steps():
    records = request([0.09, 0.11] * 8, [0.14, 0.16] * 10)
    shared = [record for record in records for _ in range(4)]  # 4 samples, one time for all
    one, four = figures(*records).speedup, figures(*shared).speedup
    assert four.estimate == pytest.approx(one.estimate)
    assert four.high - four.low == pytest.approx(one.high - one.low)


def test_a_small_difference_is_not_called_one():
    found = figures(*request([0.05, 0.15] * 6, [0.28] * 20))
    assert found.speedup.low < 1.0 < found.speedup.high
    assert "about as fast as plain decoding" in found.sentence


@pytest.mark.parametrize(("num_plain", "num_drafting"), [(0, 20), (7, 20), (20, 7)])
def test_few_steps_say_nothing_of_the_speedup(num_plain, num_drafting):
    found = figures(*request([0.1] * num_plain, [0.15] * num_drafting))
    assert found.speedup is None
    assert "plain" not in found.sentence


def test_plain_steps_right_after_a_draft_are_not_measured():
    records = request([0.1] * 12, [0.15] * 8)
    slow = replace(step(0, 0), verify_s=9.0)
    before = figures(*records).speedup
    after = figures(*numbered([*records, slow])).speedup
    tokens, seconds = 36, 2.4
    assert before.estimate == pytest.approx(0.1 * tokens / seconds)
    assert after.estimate == pytest.approx(0.1 * (tokens + 1) / (seconds + 9.0))


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
