"""Settings that cannot work are refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from forerun.align.config import (
    AlignConfig,
    AttachedConfig,
    DataConfig,
    EvaluationConfig,
    ObjectiveConfig,
    TrainingConfig,
)
from forerun.align.workspace import read_settings
from forerun.errors import InvalidRequest
from forerun.sampling.config import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def made(**changes: Any) -> AlignConfig:
    data = {
        "target": "t",
        "draft": "d",
        "data": DataConfig(prompts=Path("p"), **changes.pop("texts", {})),
    }
    return AlignConfig(**{**data, **changes})


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
        (DataConfig, {"max_prompt_tokens": 0}),
        (DataConfig, {"fixed_share": 1.5}),
    ],
)
def test_so_it_is_outside_training(kind: Any, values: dict[str, object]) -> None:
    more = {"prompts": Path("prompts.jsonl")} if kind is DataConfig else {}
    with pytest.raises(InvalidRequest, match=f"^{next(iter(values))} is"):
        kind(**more, **values)


def test_the_defaults_work() -> None:
    assert TrainingConfig().num_steps == 1000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft": "aligned/draft"}, "is to be replaced by what is learned"),
        ({"method": "medusa"}, "--draft does not go with --method medusa"),
        ({"method": "eagle3", "objective": ObjectiveConfig(objective="ce")}, "reads text alone"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_when_they_are_read(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        made(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sampling": SamplingParams(n=3)}, "n is 3"),
        ({"sampling": SamplingParams(logprobs=5)}, "logprobs is 5"),
        ({"sampling": SamplingParams(prompt_logprobs=5)}, "prompt_logprobs is 5"),
        ({"attached": AttachedConfig(num_passes=2)}, "num_passes is 2.*eagle3, dflash and medusa"),
        (
            {"method": "medusa", "draft": None, "attached": AttachedConfig(num_heads=2)},
            "num_heads.*eagle3",
        ),
        ({"texts": {"held_out": Path("h"), "held_out_share": 0.5}}, "held_out_share"),
    ],
)
def test_settings_without_effect_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{named}"):
        made(**changes)


def test_auto_takes_the_objective_of_the_temperature_and_the_method() -> None:
    assert made(sampling=GREEDY).objective_name == "fkl"
    assert made().objective_name == "nla"
    assert made(method="eagle3", attached=AttachedConfig()).objective_name == "fkl"


@pytest.mark.parametrize("stage", ["data", "sampling", "objective", "teacher"])
def test_a_manifest_whose_stage_is_no_object_is_refused(stage: str, tmp_path: Path) -> None:
    (tmp_path / "align.json").write_text(json.dumps({stage: -1}))
    with pytest.raises(InvalidRequest, match="another version of forerun, or damaged"):
        read_settings(tmp_path)
