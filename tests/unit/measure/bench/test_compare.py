from __future__ import annotations

import pytest

from forerun.measure.bench.compare import Prompt, batched, run_blocks, within_budget
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


def test_budget_stops_before_a_block_that_would_not_fit(make_arm, clock):
    arm = make_arm("a", step_s=1.0, prefill_s=0.0)  # 12 s a block
    blocks = list(within_budget(run_blocks([arm], prompts(10), clock), 40.0, clock))
    assert len(blocks) == 3
    assert clock.now_s == pytest.approx(36.0)


def test_budget_grants_the_least_number_of_blocks(make_arm, clock):
    arm = make_arm("a")
    run = run_blocks([arm], prompts(10), clock)
    assert len(list(within_budget(run, 0.0, clock, at_least=4))) == 4


def test_budget_ends_when_prompts_do(make_arm, clock):
    run = run_blocks([make_arm("a")], prompts(3), clock)
    assert len(list(within_budget(run, 1e9, clock))) == 3
