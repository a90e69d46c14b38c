from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest

from forerun.measure.bench import report as summary
from forerun.measure.bench.compare import Prompt, batched, run_blocks
from forerun.measure.bench.report import MIN_BLOCKS, best_arm, measurable, verdict
from forerun.sampling.config import SamplingParams

summarise = partial(summary.summarise, num_resamples=100)

KEYS = {
    "name",
    "method",
    "k",
    "tokens_per_s",
    "speedup",
    "speedup_ci",
    "acceptance_length",
    "acceptance_rate_per_position",
}


def run(arms, clock, count=6, max_tokens=13, batch=1):
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    prompts = (Prompt(text=str(i), params=params) for i in range(count * batch))
    return list(run_blocks(arms, batched(prompts, batch), clock))


def test_figures_follow_from_counts_and_times(make_arm, clock):
    plain = make_arm("plain", step_s=1.0, prefill_s=2.0)
    draft = make_arm("draft", k=3, accepted=2, step_s=1.5, prefill_s=2.0)
    base, fast = summarise(run([plain, draft], clock))
    # plain: 2 + 12 seconds for 13 tokens; draft: 2 + 4 steps of 1.5 seconds
    assert base.tokens_per_s.estimate == pytest.approx(13 / 14)
    assert fast.tokens_per_s.estimate == pytest.approx(13 / 8)
    assert fast.speedup.estimate == pytest.approx(14 / 8)
    assert fast.decode_speedup.estimate == pytest.approx(12 / 6)
    assert fast.acceptance_length.estimate == pytest.approx(3.0)
    assert fast.cycle_cost.estimate == pytest.approx(1.5)
    assert fast.break_even == pytest.approx(0.5 / 3)
    assert fast.decode_speedup.estimate == pytest.approx(
        fast.acceptance_length.estimate / fast.cycle_cost.estimate
    )
    assert [r.estimate for r in fast.acceptance_rate_per_position] == [1.0, 1.0, 0.0]
    assert fast.drafted_per_position == (24, 24, 24)


def test_the_baseline_compares_to_itself_as_one(make_arm, clock):
    (base,) = summarise(run([make_arm("plain")], clock))
    assert base.speedup.estimate == base.speedup.low == base.speedup.high == 1.0
    assert base.acceptance_length is None
    assert base.break_even is None


def test_rate_equal_to_break_even_means_speedup_one(make_arm, clock):
    plain = make_arm("plain", step_s=1.0)
    draft = make_arm("draft", k=4, accepted=2, step_s=3.0)
    _, even = summarise(run([plain, draft], clock))
    assert even.break_even == pytest.approx(even.draft_acceptance_rate)
    assert even.decode_speedup.estimate == pytest.approx(1.0)


def test_arms_that_emit_different_numbers_are_compared_per_token(make_arm, clock):
    plain = make_arm("plain", step_s=1.0, prefill_s=1.0)
    blocks = run([plain, make_arm("same", step_s=1.0, prefill_s=1.0)], clock, max_tokens=20)
    half = run([plain, make_arm("same", step_s=1.0, prefill_s=1.0)], clock, max_tokens=10)
    mixed = [(b[0], h[1]) for b, h in zip(blocks, half, strict=True)]
    _, same = summarise(mixed)
    assert same.speedup.estimate == pytest.approx(1.0)
    assert same.decode_speedup.estimate == pytest.approx(1.0)


def test_blocks_without_decoding_are_left_out(make_arm, clock):
    arms = [make_arm("plain")]
    blocks = run(arms, clock, count=3) + run(arms, clock, count=2, max_tokens=1)
    assert summarise(blocks)[0].num_groups == 3
    assert measurable(blocks) == blocks[:3]


def test_best_arm_is_the_fastest(make_arm, clock):
    arms = [make_arm(str(s), k=2, accepted=1, step_s=s) for s in (1.2, 0.8, 1.0)]
    assert best_arm(run(arms, clock)).name == "0.8"


def test_rows_are_json_with_the_promised_keys(make_arm, clock):
    rows = summarise(run([make_arm("plain"), make_arm("draft", k=2, accepted=1)], clock))
    for row in rows:
        content = row.to_dict()
        assert content.keys() >= KEYS
        assert json.loads(json.dumps(content)) == content


def test_looping_text_shows_in_the_share_of_distinct_ngrams(make_arm, clock):
    fresh, loop = summarise(
        run([make_arm("fresh"), make_arm("loop", vocab_size=2)], clock, max_tokens=43)
    )
    assert fresh.distinct_4gram_share == 1.0
    assert loop.distinct_4gram_share == pytest.approx(2 / 40)


def test_a_batch_is_one_block_whose_prompts_share_every_step(make_arm, clock):
    plain = make_arm("plain", step_s=1.0, prefill_s=2.0)
    draft = make_arm("draft", k=3, accepted=2, step_s=1.5, prefill_s=2.0)
    base, fast = summarise(run([plain, draft], clock, count=3, batch=4))
    # the same steps and seconds as of one prompt, four times the tokens
    assert base.num_groups == 3
    assert base.tokens_per_s.estimate == pytest.approx(4 * 13 / 14)
    assert base.decode_tokens_per_s.estimate == pytest.approx(4 * 12 / 12)
    assert base.step_s == pytest.approx(1.0)
    assert fast.speedup.estimate == pytest.approx(14 / 8)
    assert fast.cycle_cost.estimate == pytest.approx(1.5)
    assert fast.acceptance_length.estimate == pytest.approx(3.0)


def verdict_of(make_arm, clock, count=MIN_BLOCKS, **changes):
    arms = [make_arm("plain"), make_arm("draft", **changes)]
    return verdict(summarise(run(arms, clock, count=count))[1])


def test_verdict_of_a_faster_arm(make_arm, clock):
    sentence = verdict_of(make_arm, clock, k=3, accepted=2, step_s=1.5)
    assert sentence.startswith("faster, ")
    assert "accepts 40 of 60 drafted (0.67), above the break-even of 0.17" in sentence


def test_verdict_of_a_slower_arm(make_arm, clock):
    sentence = verdict_of(make_arm, clock, k=3, accepted=0, step_s=1.5)
    assert sentence.startswith("slower, ")
    assert "accepts 0 of 180 drafted (0.00), below the break-even of 0.17" in sentence


def test_verdict_where_no_draft_could_pay(make_arm, clock):
    sentence = verdict_of(make_arm, clock, k=1, accepted=1, step_s=4.0)
    assert "a step costs 4.00 plain steps, more than full acceptance would repay" in sentence


def test_verdict_of_an_arm_like_the_baseline(make_arm, clock):
    sentence = verdict_of(make_arm, clock, k=1, accepted=1, step_s=2.0)
    assert sentence.startswith("no difference shown (the interval 1.00–1.00 includes 1)")


@pytest.mark.parametrize(("accepted", "side"), [(0, "slower"), (2, "faster")])
def test_verdict_of_few_blocks_says_first_what_their_interval_shows(
    make_arm, clock, accepted, side
):
    sentence = verdict_of(make_arm, clock, count=3, k=3, accepted=accepted, step_s=1.5)
    assert sentence.startswith(f"{side}, ")
    assert "x (from 3 blocks only: its interval is a rough one): accepts" in sentence


def test_verdict_of_an_arm_whose_prefill_costs_more_than_it_gains(make_arm, clock):
    sentence = verdict_of(make_arm, clock, k=3, accepted=2, step_s=2.5, prefill_s=9.0)
    assert sentence.startswith("slower")
    assert sentence.endswith("reading the prompt with the draft costs the rest")


def test_verdict_of_the_baseline_names_its_step(make_arm, clock):
    (base,) = summarise(run([make_arm("plain", step_s=0.0125)], clock))
    assert verdict(base) == "baseline: one target pass per token, 12.5 ms each"


def delayed(measurement, seconds, *, prefill=False):
    """The same measurement, with a pause in its decoding or before it."""
    changes = {"total_s": measurement.total_s + seconds}
    if not prefill:
        changes["decode_s"] = measurement.decode_s + seconds
    return replace(measurement, **changes)


def test_a_kappa_below_one_is_a_disturbed_measurement(make_arm, clock):
    """Every plain block was slowed: the arm looks far faster than it can be."""
    plain = make_arm("plain", step_s=30.0)
    _, found = summarise(run([plain, make_arm("draft", k=3, accepted=2, step_s=1.5)], clock))
    assert found.speedup.is_above(1.0)
    assert "0.05 plain steps" in found.disturbance
    for said in (verdict(found), summary.outcome(found)):
        assert said.startswith("the measurement was disturbed")
        assert "faster" not in said and "break-even" not in said


@pytest.mark.parametrize("arm", [0, 1])
@pytest.mark.parametrize("prefill", [False, True])
def test_a_pause_in_one_block_is_no_verdict(make_arm, clock, arm, prefill):
    draft = make_arm("draft", k=3, accepted=2, step_s=1.5)
    blocks = run([make_arm("plain"), draft], clock, count=12)
    changed = list(blocks[4])
    changed[arm] = delayed(changed[arm], 900.0, prefill=prefill)
    base, found = summarise([*blocks[:4], tuple(changed), *blocks[5:]])
    assert found.disturbance is not None
    assert verdict(found).startswith("the measurement was disturbed: one block took 9")
    assert (base.disturbance is not None) == (arm == 0 and not prefill)


def test_steps_of_different_lengths_are_no_disturbance(make_arm, clock):
    """A drafter that copies drafts much in some blocks and nothing in others."""
    plain = make_arm("plain")
    idle = run([plain, make_arm("copies", k=0, step_s=1.0)], clock, count=6)
    busy = run([plain, make_arm("copies", k=8, accepted=1, step_s=2.9)], clock, count=6)
    assert [found.disturbance for found in summarise([*idle, *busy])] == [None, None]
    shorter = run([plain, make_arm("copies", k=0, step_s=0.97)], clock, count=6)
    assert summarise(shorter)[1].disturbance is None
