"""Heads under training: made for the target and its responses, trained, saved and gone on from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from tests import tiny, training

from forerun.align.config import (
    AlignConfig,
    AttachedConfig,
    DataConfig,
    EvaluationConfig,
    TeacherConfig,
)
from forerun.align.methods.base import Method, PassLoss
from forerun.align.methods.dflash import DFlashMethod
from forerun.align.methods.eagle3 import Eagle3Method
from forerun.align.objectives import OBJECTIVES
from forerun.align.samples import Packing
from forerun.align.target import TeacherSource
from forerun.align.teachers import make_teacher
from forerun.align.trainer import Trainer
from forerun.align.workspace import StepMetrics
from forerun.drafters.dflash.load import read_dflash
from forerun.drafters.dflash.network import DFlashNetwork
from forerun.drafters.eagle3.head import Eagle3Head
from forerun.drafters.eagle3.load import read_eagle3_head
from forerun.errors import (
    IncompatibleDraft,
    InvalidModel,
    InvalidRequest,
    UnsupportedFeatures,
)
from forerun.models.checkpoint import ModelFiles
from forerun.provenance import content_hash

LAYERS = (0, 1, 2)


def config_of(folder: Path, method: str = "eagle3", **attached: object) -> AlignConfig:
    target = folder / "target"
    if not target.exists():
        training.target_folder(target)
    layers = {"feature_layers": LAYERS, "draft_vocab_size": 24} if method != "medusa" else {}
    shape = {"num_passes": 3} | layers | attached
    return AlignConfig(
        target=str(target),
        method=method,
        out=folder / "out",
        device="cpu",
        data=DataConfig(prompts=folder / "prompts.jsonl"),
        attached=AttachedConfig(**shape),
        training=training.config(num_steps=30),
        evaluation=EvaluationConfig(num_speculative_tokens=3),
    )


def head_of(draft: Method) -> Eagle3Head | DFlashNetwork:
    assert isinstance(draft, Eagle3Method | DFlashMethod)
    return draft.model.head


READ = {"eagle3": read_eagle3_head, "dflash": read_dflash}


def trainer_of(
    config: AlignConfig,
    draft: Method,
    folder: Path,
    kind: str,
    precision: Literal["no", "bf16"] = "no",
) -> Trainer:
    source = TeacherSource(
        target=ModelFiles.open(config.target),
        sampling=config.sampling,
        cache_dir=folder / "cache",
        device="cpu",
    )
    packing = packed()
    settings = TeacherConfig(teacher=kind)
    teacher = make_teacher(settings, source, 1000, draft.layers)
    teacher.prepare(packing.samples)
    return Trainer(
        config=config.training,
        module=draft.loss(OBJECTIVES[config.objective_name]),
        teacher=teacher,
        accelerator=training.fresh_accelerator(precision),
        folder=folder,
        identity={},
    )


def packed() -> Packing:
    return training.packing()


def curve(trainer: Trainer, until: int) -> list[StepMetrics]:
    found: list[StepMetrics] = []
    trainer.run(packed(), until, found.append)
    return found


def losses(steps: list[StepMetrics]) -> list[float]:
    return [step.loss for step in steps]


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("method", ["eagle3", "dflash", "medusa"])
def test_a_head_learns(tmp_path, method, precision):
    config = config_of(tmp_path, method)
    draft = training.start_method(config, training.samples())
    steps = curve(trainer_of(config, draft, tmp_path, "hidden", precision), 30)
    alphas = [step.acceptance_probability for step in steps]
    assert sum(losses(steps[-5:])) < 0.8 * sum(losses(steps[:5]))
    assert sum(alphas[-5:]) > sum(alphas[:5])


def test_features_of_a_cache_and_of_the_target_train_alike(tmp_path):
    config = config_of(tmp_path)
    curves = []
    for kind in ("hidden", "model"):
        draft = training.start_method(config, training.samples())
        curves.append(losses(curve(trainer_of(config, draft, tmp_path / kind, kind), 3)))
    # The losses are differences of logarithms of order 1, whose rounding is absolute.
    assert curves[0] == pytest.approx(curves[1], rel=1e-5, abs=1e-8)


def test_an_interrupted_training_continues(tmp_path):
    config = config_of(tmp_path)

    def begun(folder: str) -> Trainer:
        draft = training.start_method(config, training.samples())
        return trainer_of(config, draft, tmp_path / folder, "model")

    through = losses(curve(begun("a"), 6))
    done = losses(curve(begun("b"), 3))
    again = begun("b")
    assert again.resume() == 3
    assert [*done, *losses(curve(again, 6))] == pytest.approx(through, rel=1e-6)


@pytest.mark.parametrize("method", [*READ])
def test_a_saved_head_is_the_trained_one(tmp_path, method):
    config = config_of(tmp_path, method)
    draft = training.start_method(config, training.samples())
    trainer = trainer_of(config, draft, tmp_path, "model")
    curve(trainer, 2)
    out = tmp_path / "head"
    draft.save(out, trainer.weights())
    draft.save(out, trainer.weights())  # again, over what is there
    saved, trained = READ[method](out), head_of(draft)
    assert saved.config == trained.config
    for name, value in trained.state_dict().items():
        expected = value.bfloat16().float() if value.is_floating_point() else value
        assert torch.equal(saved.state_dict()[name], expected), name
    assert content_hash(str(out))
    known = training.start_method(replace(config, draft=str(out)), training.samples(3))
    assert torch.equal(head_of(known).target_ids, trained.target_ids)
    assert torch.equal(head_of(known).fc.weight, saved.fc.weight)


def test_its_vocabulary_is_that_of_the_responses(tmp_path):
    config = config_of(tmp_path, draft_vocab_size=10)
    samples = training.samples()
    learned = {t for s in samples for a, b in s.spans for t in s.token_ids[a:b]}
    found = head_of(training.start_method(config, samples)).target_ids.tolist()
    assert len(found) == 10
    assert set(found) <= learned


def test_the_vocabulary_of_a_known_head_is_chosen_again_for_another_size(tmp_path):
    config = config_of(tmp_path, draft_vocab_size=20)
    samples = training.samples()
    draft = training.start_method(config, samples)
    out = tmp_path / "head"
    weights = {f"model.head.{name}": p + 1 for name, p in head_of(draft).named_parameters()}
    draft.save(out, weights)
    known = read_eagle3_head(out)
    rows = dict(zip(known.target_ids.tolist(), known.lm_head.weight, strict=True))
    for size in (12, 25):
        smaller = replace(config_of(tmp_path, draft_vocab_size=size), draft=str(out))
        found = head_of(training.start_method(smaller, samples))
        kept = [i for i, t in enumerate(found.target_ids.tolist()) if t in rows]
        assert found.lm_head.weight.shape[0] == found.config.draft_vocab_size == size
        assert len(kept) == min(size, 20)
        for row in kept:
            assert torch.equal(found.lm_head.weight[row], rows[found.target_ids.tolist()[row]])
        assert torch.equal(found.fc.weight, known.fc.weight)


def test_its_shape_can_be_chosen(tmp_path):
    shape = {"intermediate_size": 20, "num_heads": 3, "num_kv_heads": 1}
    head = head_of(training.start_method(config_of(tmp_path, **shape), training.samples()))
    assert head.layers[0].mlp.gate_proj.weight.shape[0] == 20
    assert (head.config.num_heads, head.config.num_kv_heads) == (3, 1)


@pytest.mark.parametrize("method", ["eagle3", "dflash", "medusa"])
def test_fresh_heads_are_alike(tmp_path, method):
    """Processes make theirs by themselves."""
    config = config_of(tmp_path, method)
    modules = [
        training.start_method(config, training.samples()).loss(OBJECTIVES["fkl"]) for _ in range(2)
    ]
    for one, other in zip(*(module.parameters() for module in modules), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("method", [*READ])
def test_a_head_of_another_target_is_refused(tmp_path, method):
    config = config_of(tmp_path, method)
    draft = training.start_method(config, training.samples())
    weights = {f"model.head.{name}": p for name, p in head_of(draft).named_parameters()}
    draft.save(tmp_path / "head", weights)
    other = config_of(tmp_path / "other", method)
    training.target_folder(tmp_path / "other" / "target", hidden_size=48)
    with pytest.raises(IncompatibleDraft, match="for a target 32 wide with 300 tokens"):
        training.start_method(replace(other, draft=str(tmp_path / "head")), training.samples())


def test_a_network_of_another_block_or_vocabulary_is_refused(tmp_path):
    config = config_of(tmp_path, "dflash")
    draft = training.start_method(config, training.samples())
    weights = {f"model.head.{name}": p for name, p in head_of(draft).named_parameters()}
    draft.save(tmp_path / "head", weights)
    for changed in ({"num_passes": 4}, {"draft_vocab_size": 30}):
        other = config_of(tmp_path, "dflash", **changed)
        (name,) = changed
        with pytest.raises(InvalidRequest, match=f"{name} is .*, but the network in .* has"):
            training.start_method(replace(other, draft=str(tmp_path / "head")), [])


def test_a_network_of_all_tokens_uses_the_output_matrix_of_the_target(tmp_path):
    config = config_of(tmp_path, "dflash", draft_vocab_size=tiny.VOCAB_SIZE)
    draft = training.start_method(config, training.samples())
    trainer = trainer_of(config, draft, tmp_path, "model")
    steps = curve(trainer, 20)
    assert sum(losses(steps[-5:])) < 0.9 * sum(losses(steps[:5]))
    draft.save(tmp_path / "head", trainer.weights())
    assert not read_dflash(tmp_path / "head").config.own_output


def test_a_target_too_shallow_for_the_default_layers_is_named(tmp_path):
    with pytest.raises(InvalidModel, match="2 layers has no layers 2, L/2 and L - 3"):
        training.start_method(config_of(tmp_path, feature_layers=()), training.samples())
    with pytest.raises(UnsupportedFeatures, match=r"feature_layers names \[7\]"):
        training.start_method(config_of(tmp_path, feature_layers=(0, 1, 7)), training.samples())


def test_greedy_deployments_train_at_temperature_1(tmp_path):
    config = config_of(tmp_path)
    greedy = replace(config, sampling=replace(config.sampling, temperature=0))
    draft = training.start_method(greedy, training.samples())
    module = draft.loss(OBJECTIVES[greedy.objective_name])
    assert isinstance(module, PassLoss)
    assert (module.temperature, module.objective.name) == (1.0, "fkl")
