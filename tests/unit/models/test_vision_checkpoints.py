"""Checkpoints of models that read images: their text part runs, and nothing else is read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests import tiny
from tests.contract.test_families import continued
from tests.contract.test_more_families import network, texts

from forerun.errors import InvalidModel
from forerun.models.load import load_model

SIGHT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
VISION: dict[str, dict[str, Any]] = {
    "Gemma3": SIGHT | {"image_size": 28, "patch_size": 14},
    "Gemma4": SIGHT | {"num_key_value_heads": 2, "head_dim": 8},
    "Mistral3": SIGHT | {"image_size": 28, "patch_size": 14, "head_dim": 8},
    "Qwen3_5": {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32},
    "Qwen3_5Moe": {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32},
}
TEXT = {"Gemma3": "Gemma3", "Mistral3": "Ministral3"}


def whole(family: str) -> Any:
    """A model with a vision tower, whose text part has the weights of the contract test."""
    text = network(TEXT.get(family, family))
    model_class = getattr(transformers, f"{family}ForConditionalGeneration")
    settings = text.config.to_dict()
    config = model_class.config_class(text_config=settings, vision_config=VISION[family])
    config.tie_word_embeddings = False
    config._attn_implementation = "eager"
    made = model_class(config).eval()
    made.model.language_model.load_state_dict(text.model.state_dict())
    made.lm_head.load_state_dict(text.lm_head.state_dict())
    return made.float()


@pytest.fixture(scope="module", params=VISION)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    made = whole(request.param)
    made.save_pretrained(folder)
    return made, folder


@pytest.mark.one_in(2)
def test_the_text_part_says_what_the_whole_model_says(saved, caplog):
    made, folder = saved
    prompts = [tiny.tokenizer().encode(prompt) for prompt in tiny.PROMPTS]
    expected = [continued(made, ids, 10) for ids in prompts]
    with caplog.at_level(logging.INFO):
        model = load_model(folder, max_batch=4, max_context=tiny.MAX_CONTEXT, dtype="float32")
    assert caplog.text.count("reads images too: its text part is served") == 1
    assert texts(model, k=0) == expected


def test_tensors_of_no_part_are_refused(saved, tmp_path):
    _, folder = saved
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (file,) = tmp_path.glob("*.safetensors")
    save_file(load_file(file) | {"model.other.weight": torch.ones(2)}, file, {"format": "pt"})
    with pytest.raises(InvalidModel, match=r"1 unexpected, the first model\.other\.weight"):
        load_model(tmp_path, max_context=10)


def test_another_language_model_is_refused_by_name(saved, tmp_path):
    _, folder = saved
    settings = json.loads((folder / "config.json").read_text())
    settings["text_config"]["model_type"] = "llama"
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InvalidModel, match=r"ForConditionalGeneration"):
        load_model(Path(tmp_path), max_context=10)
