"""What a run is a function of: everything that decides, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.training import pair

from forerun.align.config import (
    AlignConfig,
    DataConfig,
    EvaluationConfig,
    ObjectiveConfig,
    TeacherConfig,
    TrainingConfig,
)
from forerun.align.samples import PromptRecord, Sample
from forerun.align.texts import PromptSplit
from forerun.align.workspace import (
    Workspace,
    check_folder,
    claim_folder,
    differences,
    identity_of,
    of_training,
    settings_of,
)
from forerun.errors import InvalidRequest, UnreadableInput
from forerun.sampling.config import SamplingParams

DTYPES = {"training": "no", "target": "float32"}
BROUGHT = Sample(prompt_hash="a", token_ids=(1, 2, 3), spans=((2, 3),), source="fixed")


def prompt(prompt_hash: str, **more: Any) -> PromptRecord:
    own = {"prompt_ids": (1, 2), "tag": "t", "where": "p.jsonl:1", **more}
    return PromptRecord(prompt_hash=prompt_hash, **own)


PROMPTS = PromptSplit(training=(prompt("a"), prompt("b")), held_out=(prompt("c"),))


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> AlignConfig:
    folder = tmp_path_factory.mktemp("pair")
    _, draft = pair(folder)
    return AlignConfig(
        target="somewhere", draft=str(draft), data=DataConfig(prompts=Path("prompts.jsonl"))
    )


def identity(
    config: AlignConfig, prompts: PromptSplit = PROMPTS, target: str = "t0"
) -> dict[str, str]:
    return identity_of(config, prompts.hashes, target)


@pytest.mark.parametrize(
    "changes",
    [
        {"teacher": TeacherConfig(cache_dir=Path("/elsewhere"))},
        {"teacher": TeacherConfig(max_cache_bytes=10)},
        {"training": TrainingConfig(rows_per_pass=1, checkpoint_every_s=1.0)},
        {"device": "cpu", "out": Path("/elsewhere"), "export": ("vllm",)},
        {"data": DataConfig(prompts=Path("/elsewhere/prompts.jsonl"))},
        {"sampling": SamplingParams(max_tokens=128, logit_bias={}, temperature=1)},
        {"target": "the-same-elsewhere"},
    ],
)
def test_what_decides_nothing_may_change(config, changes):
    assert identity(replace(config, **changes)) == identity(config)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sampling": SamplingParams(max_tokens=128, top_p=0.9)}, "sampling.top_p was 1, is 0.9"),
        ({"objective": ObjectiveConfig(objective="tv")}, "objective.objective was auto, is tv"),
        ({"teacher": TeacherConfig(teacher="model")}, "teacher.teacher was auto, is model"),
        ({"training": TrainingConfig(num_steps=9)}, "training.num_steps was 1000, is 9"),
        (
            {"evaluation": EvaluationConfig(num_evaluations=3)},
            "evaluation.num_evaluations was 8, is 3",
        ),
        ({"dtype": "float32"}, "dtype was auto, is float32"),
    ],
)
def test_what_decides_is_named(config, changes, named):
    assert differences(identity(config), identity(replace(config, **changes))) == [named]


def test_content_decides_whatever_its_name(config):
    others = [
        identity(config, target="t1"),
        identity(config, replace(PROMPTS, training=PROMPTS.training[:1])),
        identity(config, replace(PROMPTS, held_out=(prompt("d"),))),
        identity(config, replace(PROMPTS, held_out=(prompt("c", tag="u"),))),
        identity(config, replace(PROMPTS, training=(prompt("a", brought=(BROUGHT,)), prompt("b")))),
    ]
    assert len({json.dumps(found) for found in [identity(config), *others]}) == 6


def test_a_draft_made_from_nothing_is_what_its_file_says(config, tmp_path):
    for name, content in (("a", "{}"), ("b", "{}"), ("c", '{"hidden_size": 8}')):
        (tmp_path / name).write_text(content)
    a, b, c = (
        identity(replace(config, draft=None, init=tmp_path / name))["draft"] for name in "abc"
    )
    assert a == b != c
    with pytest.raises(UnreadableInput, match="cannot be read: No such file"):
        identity(replace(config, draft=None, init=tmp_path / "d"))


def test_a_folder_is_one_alignments(config, tmp_path):
    workspace = Workspace(root=tmp_path / "out")
    check_folder(workspace, identity(config))
    claim_folder(settings_of(config), workspace, identity(config), DTYPES)
    elsewhere = replace(config, teacher=TeacherConfig(teacher="model"))
    check_folder(workspace, identity(elsewhere))  # until the first checkpoint
    claim_folder(settings_of(elsewhere), workspace, identity(elsewhere), DTYPES)
    with pytest.raises(InvalidRequest, match="target was t0, is t1"):
        check_folder(workspace, identity(config, target="t1"))
    assert json.loads(workspace.manifest.read_text())["teacher"]["teacher"] == "model"


def test_a_checkpoint_is_of_one_teacher(config):
    other = replace(config, teacher=TeacherConfig(teacher="model"))
    assert of_training(identity(other)) != of_training(identity(config))
