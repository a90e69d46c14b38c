"""Settings that cannot work are refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from forerun.align.config import DataConfig, EvaluationConfig, ObjectiveConfig, TrainingConfig
from forerun.errors import InvalidRequest


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_steps", 0),
        ("num_steps", 2.5),
        ("tokens_per_step", 0),
        ("window", 1),
        ("rows_per_pass", 0),
        ("learning_rate", 0.0),
        ("learning_rate", math.nan),
        ("warmup_share", 1.5),
        ("weight_decay", -0.1),
        ("max_grad_norm", 0.0),
        ("lora_rank", -1),
        ("checkpoint_every_s", -1.0),
        ("training_seed", -1),
    ],
)
def test_what_cannot_work_is_named(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} is"):
        TrainingConfig(**{name: value})


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (EvaluationConfig, {"num_speculative_tokens": 0}),
        (EvaluationConfig, {"num_evaluations": 0}),
        (EvaluationConfig, {"max_prompts": 1}),
        (ObjectiveConfig, {"beta": 1.5}),
        (ObjectiveConfig, {"eta": -1.0}),
        (DataConfig, {"samples_per_prompt": 0}),
    ],
)
def test_so_it_is_outside_training(kind: Any, values: dict[str, object]) -> None:
    more = {"prompts": Path("prompts.jsonl")} if kind is DataConfig else {}
    with pytest.raises(InvalidRequest, match=f"^{next(iter(values))} is"):
        kind(**more, **values)


def test_the_defaults_work() -> None:
    assert TrainingConfig().num_steps == 1000
