"""Golden rows find mislabelled heads: each is read as it was meant, or refused by name."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import heads, tiny

from forerun.drafters.eagle3.load import (
    GOLDEN_FILE,
    examine,
    load_eagle3,
    write_eagle3_head,
    write_golden,
)
from forerun.errors import IncompatibleDraft, InvalidModel
from forerun.models.base import Context, pack

TEXT = [7, 3, 11, 250, 9, 9, 41, 2, 18, 5]
LAYERS = (2, 3, 5)


@pytest.fixture(scope="module")
def target():
    return tiny.adapted(tiny.network(num_layers=6))


@pytest.fixture
def folder(tmp_path, target):
    """A head with norms that matter, saved with golden rows."""
    head = heads.eagle3_head(target, feature_layers=LAYERS, norm_before_residual=True)
    context = Context(target.store, TEXT)
    batch = replace(pack([context.span(len(TEXT))], TEXT, [], target.device), feature_layers=LAYERS)
    features = target.forward(batch).features
    context.close()
    tokens = torch.tensor(TEXT)
    write_golden(head, tmp_path, tokens=tokens, features=features, embed=target.embed)
    write_eagle3_head(head.to(torch.bfloat16), tmp_path, target="t")
    return tmp_path


def setting(**changes):
    def plant(folder):
        path = folder / "config.json"
        settings = json.loads(path.read_text())
        for name, value in changes.items():
            nested = settings["transformer_layer_config"]
            (nested if name in nested else settings)[name] = value
        path.write_text(json.dumps(settings))

    return plant


def tensors(change):
    def plant(folder):
        path = folder / "model.safetensors"
        stored = load_file(path)
        change(stored)
        save_file({name: value.contiguous() for name, value in stored.items()}, path)

    return plant


def swapped(first, second):
    def change(stored):
        stored[first], stored[second] = stored[second], stored[first]

    return tensors(change)


def state_before_embedding(stored):
    for kind in "qkv":
        name = f"layers.0.self_attn.{kind}_proj.weight"
        stored[name] = torch.cat([*stored[name].chunk(2, dim=1)][::-1], dim=1)


def absolute_ids(stored):
    stored["d2t"] += torch.arange(len(stored["d2t"]))


def shuffled_head(stored):
    stored["lm_head.weight"] = stored["lm_head.weight"].flip(0)


def other_vocabulary(stored):
    ids = stored["d2t"] + torch.arange(len(stored["d2t"]))
    moved = (ids + 1) % tiny.VOCAB_SIZE
    order = moved.sort().values
    stored["d2t"] = order - torch.arange(len(order))
    stored["t2d"] = torch.zeros(tiny.VOCAB_SIZE, dtype=torch.bool).index_fill_(0, order, True)


IDS = "eagle_aux_hidden_state_layer_ids"
ROPE = {"rope_type": "default", "rope_theta": 100.0}
READ = [
    ("ids of outputs", setting(**{IDS: [1, 2, 4]}), r"feature layers \[2, 3, 5\] instead of"),
    ("ids one too high", setting(**{IDS: [3, 4, 6]}), r"feature layers \[2, 3, 5\] instead of"),
    ("ids in another order", setting(**{IDS: [5, 3, 2]}), r"feature layers \[2, 3, 5\]"),
    ("norm_output", setting(norm_output=True), "norm_output=False"),
    ("norm_before_residual", setting(norm_before_residual=False), "norm_before_residual=True"),
    (
        "both flags",
        setting(norm_before_residual=False, norm_output=True),
        "norm_output=False.*norm_before_residual=True",
    ),
    ("absolute d2t", tensors(absolute_ids), "d2t holds target ids"),
]
REFUSED = [
    ("rotary base", setting(rope_parameters=ROPE), "attended.*no weight has changed"),
    ("heads", setting(num_attention_heads=2, num_key_value_heads=1, head_dim=32), "attended"),
    ("epsilon", setting(rms_norm_eps=0.1), "joined|attended"),
    ("gate and up", swapped(*(f"layers.0.mlp.{k}_proj.weight" for k in ("gate", "up"))), "output"),
    ("joined order", tensors(state_before_embedding), "attended.*q_proj"),
    (
        "norms",
        swapped("layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"),
        "joined.*hidden_norm",
    ),
    ("output rows", tensors(shuffled_head), "logits.*lm_head"),
    ("vocabulary", tensors(other_vocabulary), "top_tokens.*d2t"),
    ("a missing flag", setting(norm_before_fc=True), "input_norm.weight"),
]


def test_the_head_as_saved_is_loaded_without_notice(folder, target, caplog):
    with caplog.at_level(logging.WARNING):
        drafter = load_eagle3(folder, target)
    assert not caplog.messages
    assert drafter.required_features == LAYERS
    report = examine(folder, target)
    assert report.is_checked
    assert not report.changes


@pytest.mark.parametrize(("name", "plant", "reading"), READ, ids=[name for name, *_ in READ])
def test_a_mislabelled_head_is_read_as_it_was_meant(folder, target, caplog, name, plant, reading):
    plant(folder)
    with caplog.at_level(logging.WARNING):
        drafter = load_eagle3(folder, target)
    assert drafter.required_features == LAYERS
    assert drafter.model.network.config.norm_before_residual
    assert not drafter.model.network.config.norm_output
    assert any(r.levelno == logging.WARNING for r in caplog.records)
    assert re.search(reading, " ".join(caplog.messages)), caplog.messages


@pytest.mark.parametrize(("name", "plant", "message"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_a_head_that_no_reading_explains_is_refused(folder, target, name, plant, message):
    plant(folder)
    with pytest.raises(InvalidModel, match=message):
        load_eagle3(folder, target)


def test_a_head_for_another_target_is_refused(folder):
    with pytest.raises(IncompatibleDraft, match="trained for another target"):
        load_eagle3(folder, tiny.adapted(tiny.network(num_layers=6, seed=9)))


def test_another_target_with_the_same_embedding_is_refused(folder, target):
    other = tiny.network(num_layers=6)
    with torch.no_grad():
        for layer in other.model.layers:
            layer.mlp.down_proj.weight.mul_(-1)
    with pytest.raises(IncompatibleDraft, match="not that of any layer"):
        load_eagle3(folder, tiny.adapted(other))


def test_a_head_without_golden_rows_is_taken_at_its_word(folder, target):
    (folder / GOLDEN_FILE).unlink()
    assert not examine(folder, target).is_checked


def test_golden_rows_are_not_among_the_weights_that_other_engines_read(folder, target):
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    (folder / GOLDEN_FILE).rename(folder / "golden.safetensors")
    with pytest.raises(InvalidModel, match=r"read as weights by vLLM: rename it to golden\.rows"):
        load_eagle3(folder, target)


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_damaged_golden_rows_are_refused(folder, target, content):
    (folder / GOLDEN_FILE).write_bytes(content)
    with pytest.raises(InvalidModel, match="golden rows"):
        load_eagle3(folder, target)
