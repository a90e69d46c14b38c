from __future__ import annotations

from itertools import pairwise

import pytest

from forerun.measure.bench import compare
from forerun.measure.bench.compare import Prompt, batched, run_blocks, scouted
from forerun.measure.prompt_files import neighbours_apart
from forerun.sampling.config import SamplingParams


def prompts(count, max_tokens=13, batch=1):
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return batched((Prompt(text=f"p{i}", params=params) for i in range(count)), batch)


def test_every_arm_continues_every_prompt_in_rotated_order(make_arm, clock):
    log = []
    arms = [make_arm(name) for name in "abc"]
    for arm in arms:
        arm.engine.calls = log_of(log, arm.name)
    blocks = list(run_blocks(arms, prompts(4), clock))
    assert log == [*"abc", *"bca", *"cab", *"abc"]
    assert [[m.arm.name for m in block] for block in blocks] == [list("abc")] * 4


def log_of(log, name):
    class Log(list):
        def __iadd__(self, prompts):
            log.extend(name for _ in prompts)
            return self

    return Log()


def test_wall_time_and_decode_time_are_separate(make_arm, clock):
    arm = make_arm("a", k=3, accepted=2, step_s=0.5, prefill_s=4.0)
    ((measurement,),) = run_blocks([arm], prompts(1), clock)
    assert measurement.num_tokens == 13
    assert measurement.num_decoded == 12
    assert measurement.decode_s == pytest.approx(4 * 0.5)
    assert measurement.total_s == pytest.approx(4.0 + 4 * 0.5)


def test_blocks_are_measured_only_when_asked_for(make_arm, clock):
    arm = make_arm("a")
    blocks = run_blocks([arm], prompts(10), clock)
    next(blocks)
    assert arm.engine.calls == ["p0"]


def test_spread_keeps_every_prompt_and_parts_neighbours():
    prompts = [str(i) for i in range(60)]
    spread_out = neighbours_apart(prompts)
    assert sorted(spread_out) == sorted(prompts)
    assert all(abs(int(a) - int(b)) > 1 for a, b in pairwise(spread_out))


def test_scouting_cuts_completions_before_they_repeat(make_arm):
    engine = make_arm("plain", vocab_size=20).engine  # 0..19, 0..19: repeats from token 20 on
    params = SamplingParams(temperature=0, max_tokens=80)
    assert [p.params.max_tokens for p in scouted(engine, ["a", "b"], params)] == [20, 20]


def test_scouting_decodes_no_more_than_is_asked_for(make_arm):
    engine = make_arm("plain").engine
    texts = [str(i) for i in range(20)]
    prompts = scouted(engine, texts, SamplingParams(temperature=0, max_tokens=40))
    assert next(prompts).text == "0"
    assert engine.calls == texts[:8]


def test_scouting_ends_where_no_prompt_can_be_timed(make_arm, monkeypatch):
    monkeypatch.setattr(compare, "MAX_PASSED_OVER", 16)
    engine = make_arm("plain", vocab_size=20).engine
    texts = [str(i) for i in range(80)]
    params = SamplingParams(temperature=0, max_tokens=8)  # shorter than what is timed
    assert not [*scouted(engine, texts, params)]
    assert engine.calls == texts[:16]
