"""GGUF files that are written: read again they are the model, with its logits and its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from tests import tiny
from tests.gguf_files import all_of
from tests.gguf_files import write_gguf as write_by_hand
from tokenizers import Regex, models, normalizers, pre_tokenizers

from forerun.errors import InvalidModel
from forerun.models.checkpoint import ModelFiles
from forerun.models.gguf.splits import LLAMA3, QWEN2
from forerun.models.gguf_writer import write_gguf
from forerun.models.load import load_model

TEXTS = ("def add(a, b):  # 1234\n\treturn a+b", "héllo wörld 😀 <|end|> don't", "   x\n\n y ")
IDS = [5, 9, 2, 7, 30, 1, 4, 4, 8, 77, 100, 3, 2, 9, 11, 200, 31, 8, 8, 1]
LLAMA3_ROTATION = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def save(
    folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **changes
) -> Path:
    """A folder with a random model of some settings and the tokenizer of `tiny`."""
    model = tiny.network(family, vocab_size=changes.pop("vocab_size", tiny.VOCAB_SIZE))
    for name, value in changes.items():
        setattr(model.config, name, value)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.to(dtype).save_pretrained(folder)
    tiny.backend().save_pretrained(folder)
    return folder


def logits(source: Path) -> torch.Tensor:
    model = load_model(source, dtype="float32", max_batch=1, max_context=64, runner="graphs")
    return tiny.logits_of(model, IDS)


def split_by(folder: Path, *steps: object, **others: object) -> None:
    """Give the tokenizer of a folder other steps before its merges, and other settings."""
    backend = tiny.byte_level_bpe(tiny.CORPUS)
    backend.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    for name, value in others.items():
        setattr(backend.backend_tokenizer, name, value)
    backend.save_pretrained(folder)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_and_tokens_are_those_of_the_folder(tmp_path, family, is_tied):
    # The tokenizer that transformers makes for Qwen2 has a token more, and rows may be padding.
    settings = {"tie_word_embeddings": is_tied, "vocab_size": tiny.VOCAB_SIZE + 4}
    folder = ModelFiles.open(save(tmp_path / "draft", family, **settings))
    write_gguf(folder, tmp_path / "draft.gguf", folder)
    torch.testing.assert_close(
        logits(tmp_path / "draft.gguf"), logits(folder.folder), atol=1e-4, rtol=0
    )
    file = ModelFiles.open(tmp_path / "draft.gguf")
    for text in TEXTS:
        assert file.tokenizer.encode(text) == folder.tokenizer.encode(text)
    assert file.tokenizer.eos_token_id == folder.tokenizer.eos_token_id
    assert ("lm_head.weight" in file.weights.names) == (not is_tied)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_stay_as_they_are_stored(tmp_path, dtype):
    folder = ModelFiles.open(save(tmp_path / "draft", dtype=dtype))
    write_gguf(folder, tmp_path / "draft.gguf", folder)
    file = ModelFiles.open(tmp_path / "draft.gguf")
    assert file.stored_dtype == folder.stored_dtype
    for name in folder.weights.names:
        assert torch.equal(file.weights.read(name), folder.weights.read(name).float())


def test_scaled_rotations_of_llama_3_are_written(tmp_path):
    folder = ModelFiles.open(save(tmp_path / "draft", rope_parameters=LLAMA3_ROTATION))
    write_gguf(folder, tmp_path / "draft.gguf", folder)
    torch.testing.assert_close(
        logits(tmp_path / "draft.gguf"), logits(folder.folder), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(
    ("name", "patterns", "ignores_merges"),
    [("llama3", LLAMA3, True), ("dbrx", LLAMA3, False), ("qwen2", QWEN2, False)],
)
def test_the_rule_of_splits_has_its_name_in_llama_cpp(tmp_path, name, patterns, ignores_merges):
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    save(tmp_path)
    split_by(tmp_path, *steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["ignore_merges"] = ignores_merges
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    folder = ModelFiles.open(tmp_path)
    write_gguf(folder, tmp_path / "draft.gguf", folder)
    file = ModelFiles.open(tmp_path / "draft.gguf")
    assert file.weights.metadata["tokenizer.ggml.pre"] == name
    for text in TEXTS:
        assert file.tokenizer.encode(text) == folder.tokenizer.encode(text)


def test_the_tokenizer_of_a_gguf_target_is_copied(tmp_path):
    folder = save(tmp_path / "draft")
    target = write_by_hand(tmp_path / "target.gguf", folder, all_of(gguf.GGMLQuantizationType.F32))
    write_gguf(ModelFiles.open(folder), tmp_path / "draft.gguf", ModelFiles.open(target))
    copied, original = (ModelFiles.open(path).weights for path in (tmp_path / "draft.gguf", target))
    names = {name for name in original.metadata if name.startswith("tokenizer.")}
    assert names == {name for name in copied.metadata if name.startswith("tokenizer.")}
    for name in names:
        if found := original.array(name):
            assert copied.array(name) == found
        else:
            assert copied.metadata[name] == original.metadata[name]


def refused(folder: Path, match: str) -> None:
    draft = ModelFiles.open(folder)
    with pytest.raises(InvalidModel, match=match):
        write_gguf(draft, folder / "draft.gguf", draft)
    assert not (folder / "draft.gguf").exists()


def test_what_is_not_written_is_refused_by_its_name(tmp_path):
    refused(save(tmp_path / "a", "olmo2"), "Olmo2ForCausalLM in F32; written are Llama")
    refused(save(tmp_path / "b", "qwen2-mixed"), "its gate, its windows or its rotation")
    scaled = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    refused(save(tmp_path / "c", rope_parameters=scaled), r"rotation \(linear\)")
    refused(save(tmp_path / "d", hidden_act="gelu_pytorch_tanh"), "its gate")
    folder = save(tmp_path / "e")
    split_by(folder, pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=False))
    refused(folder, "none of those that llama.cpp knows")
    split_by(
        folder,
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        normalizer=normalizers.Lowercase(),
    )
    refused(folder, "none of those that llama.cpp knows")
    split_by(folder, model=models.Unigram([("a", 0.0), ("b", -1.0)], unk_id=0))
    refused(folder, "Unigram")
