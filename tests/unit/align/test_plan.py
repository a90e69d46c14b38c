"""The plan of an alignment: settings by size, steps, and what it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests import tiny

from forerun.align.config import AlignConfig, DataConfig, EvaluationConfig, TrainingConfig
from forerun.align.plan import (
    Rates,
    TargetSizes,
    TextSizes,
    choose_num_steps,
    defaults_for,
    fill_in,
    make_plan,
    measure_prompts,
    measure_rates,
)
from forerun.align.samples import PromptRecord
from forerun.models.architecture import Architecture
from forerun.sampling.config import SamplingParams

ARCHITECTURE = Architecture(
    name="LlamaForCausalLM",
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    hidden_size=576,
    vocab_size=49_152,
    max_positions=8192,
)
SIZES = TargetSizes(
    num_parameters=134_515_008,
    architecture=ARCHITECTURE,
    intermediate_size=1536,
    dtype=torch.bfloat16,
    device=torch.device("cpu"),
)
TEXTS = TextSizes(
    num_training=5000, num_held_out=40, judged_on="40 chats", prompt_tokens=100, num_texts=5500
)
RATES = Rates(decode_tokens_per_s=250, prefill_tokens_per_s=600, flop_per_s=1e11)


def config(**changes: object) -> AlignConfig:
    values = {
        "target": "t",
        "method": "eagle3",
        "data": DataConfig(prompts=Path("p.jsonl")),
        "sampling": SamplingParams(max_tokens=128),
        "training": TrainingConfig(num_steps=1000, tokens_per_step=2048, window=512),
        "evaluation": EvaluationConfig(num_evaluations=8, max_prompts=24),
    }
    return AlignConfig(**(values | changes))


def test_larger_targets_and_gpus_have_other_settings():
    small = defaults_for(SIZES, "eagle3")
    gpu = replace(SIZES, device=torch.device("cuda"), num_parameters=7_000_000_000)
    large = defaults_for(gpu, "eagle3")
    assert small.num_prompts == 5000 < large.num_prompts
    assert small.max_tokens < large.max_tokens < large.window
    assert (small.learning_rate, large.learning_rate) == (5e-4, 1e-4)
    assert defaults_for(gpu, "draft_model").learning_rate == TrainingConfig().learning_rate


@pytest.mark.parametrize(
    ("num_tokens", "num_steps"),
    [
        (10, 1),  # at least one
        (10_000, 60),  # 12 times
        (500_000, 750),  # 1.5 million tokens
        (10_000_000, 7500),  # 1.5 times
    ],
)
def test_few_texts_are_read_more_often(num_tokens, num_steps):
    assert choose_num_steps(num_tokens, 2000) == num_steps


def test_flags_override_what_the_size_suggests():
    chosen = defaults_for(SIZES, "eagle3")
    left_out = dict.fromkeys(("num_steps", "window", "tokens_per_step", "learning_rate"))
    sized = fill_in(config(), chosen, TEXTS, left_out).training
    assert (sized.window, sized.tokens_per_step) == (chosen.window, chosen.tokens_per_step)
    assert sized.num_steps == choose_num_steps(5000 * 228, chosen.tokens_per_step)
    given = {**left_out, "num_steps": 7, "window": 64}
    own = fill_in(config(), chosen, TEXTS, given).training
    assert (own.num_steps, own.window, own.learning_rate) == (7, 64, chosen.learning_rate)


def prompt(length: int) -> PromptRecord:
    return PromptRecord(prompt_ids=(1,) * length, prompt_hash="0" * 16, tag="", where="")


def test_what_will_be_cut_is_counted():
    mean, cut, long = measure_prompts([prompt(n) for n in (2, 4, 6, 8)], 8, 5)
    assert (mean, cut, long) == (5, 0.25, 0.5)


def test_times_follow_from_tokens_and_rates():
    plan = make_plan(config(), SIZES, TEXTS, RATES)
    response = 0.9 * 128
    assert plan.num_response_tokens == round(5000 * response)
    assert plan.minutes["prompts"] == pytest.approx(5500 * 60 / 250 / 60)
    answered_s = 5000 * response / 250 + 5000 * 100 / 600
    assert plan.minutes["responses"] == pytest.approx(answered_s / 60)
    assert plan.minutes["teacher"] == pytest.approx(5000 * (100 + response) / 600 / 60)
    assert plan.minutes["judging"] == pytest.approx((9 * 24 + 2 * 40) * 128 / 250 / 60)
    assert plan.passes == pytest.approx(1000 * 2048 * 0.95 / (5000 * (100 + response)))
    twice = make_plan(config(), SIZES, TEXTS, replace(RATES, flop_per_s=2e11))
    assert plan.minutes["training"] == pytest.approx(2 * twice.minutes["training"])


def test_a_head_takes_the_time_that_was_measured():
    """164 learned tokens a second at 52 to 65 GFLOP/s (benchmarks/align/real-model.md)."""
    rates = replace(RATES, flop_per_s=58e9)
    texts = replace(TEXTS, prompt_tokens=0.0, num_texts=0)
    attached = replace(config().attached, draft_vocab_size=5760)
    plan = make_plan(config(attached=attached), SIZES, texts, rates)
    assert "prompts" not in plan.minutes
    assert 1000 * 2048 * 0.95 / (plan.minutes["training"] * 60) == pytest.approx(164, rel=0.15)


def test_the_cache_is_the_largest_part_of_the_disk_for_a_head():
    plan = make_plan(config(), SIZES, TEXTS, RATES)
    states = 5000 * (100 + 0.9 * 128) * 4 * 576 * 2
    assert states < plan.disk_bytes < 1.5 * states
    text_alone = replace(config().teacher, teacher="model")
    assert make_plan(config(teacher=text_alone), SIZES, TEXTS, RATES).disk_bytes < states / 10


def test_a_line_says_each_thing_that_is_paid_for():
    lines = make_plan(config(), SIZES, TEXTS, RATES).lines()
    assert [line.split()[0] for line in lines] == [
        *("plan:", "prompts", "responses", "teacher", "training", "judging", "cut", "in"),
    ]
    assert "5,000, written by the target: about 5,500 texts" in lines[1]


def test_rates_are_tokens_over_the_time_between_two_looks_at_the_clock():
    engine = tiny.engine_over(tiny.adapted(tiny.network(seed=3)), k=0)
    ticks = iter(range(100))
    rates = measure_rates(engine, clock=lambda: float(next(ticks)))
    assert rates.decode_tokens_per_s == engine.config.max_batch * 24
    assert rates.prefill_tokens_per_s == min(128, engine.max_context - 1)
    assert rates.flop_per_s == 2 * 1024**3
