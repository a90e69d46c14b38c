"""Drafts to train: loaded or made, refused where they cannot be, written as they are served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests import tiny, training
from transformers import AutoModelForCausalLM

from forerun.align.methods.draft_model import DraftModelMethod
from forerun.errors import IncompatibleDraft, InvalidModel
from forerun.models.checkpoint import ModelFiles


def weights_of(draft: DraftModelMethod) -> dict[str, torch.Tensor]:
    """As `Trainer.weights` gives them."""
    parameters = draft.model.named_parameters()
    return {f"model.{n}": p.detach().clone() for n, p in parameters if p.requires_grad}


def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def config_file(folder: Path, **changes: object) -> Path:
    settings = tiny.network(hidden_size=16).config.to_dict() | changes
    path = folder / "shape.json"
    path.write_text(json.dumps(settings))
    return path


def test_it_is_trained_in_fp32_and_saved_in_bf16(tmp_path: Path) -> None:
    draft = training.tiny_draft(tmp_path)
    assert {p.dtype for p in draft.model.parameters()} == {torch.float32}
    weights = {name: tensor + 0.25 for name, tensor in weights_of(draft).items()}
    out = tmp_path / "trained"
    draft.save(out, weights)
    draft.save(out, weights)  # again, over what is there
    saved = load_file(out / "model.safetensors")
    assert {f"model.{name}" for name in saved} == weights.keys()
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, weights[f"model.{name}"].bfloat16())
    assert (
        ModelFiles.find(out).tokenizer.vocabulary
        == ModelFiles.find(tmp_path / "target").tokenizer.vocabulary
    )
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == torch.bfloat16
    assert not list(tmp_path.glob("trained.*.tmp"))


def test_a_tied_head_stays_tied(tmp_path: Path) -> None:
    target, folder = training.pair(tmp_path)
    network = tiny.network(hidden_size=16)
    network.config.tie_word_embeddings = True
    network.tie_weights()
    network.save_pretrained(folder)
    draft = training.load_draft(target=target, draft=folder)
    weights = weights_of(draft)
    assert "model.lm_head.weight" not in weights
    draft.save(tmp_path / "out", weights)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_one_is_made_from_a_shape(tmp_path: Path) -> None:
    target, _ = training.pair(tmp_path)
    shape = config_file(tmp_path, vocab_size=77, num_hidden_layers=1, eos_token_id=5)
    made = [training.load_draft(target=target, init=shape, seed=seed).model for seed in (1, 1, 2)]
    assert made[0].config.vocab_size == tiny.VOCAB_SIZE
    assert made[0].config.num_hidden_layers == 1
    assert made[0].config.eos_token_id == tiny.EOS
    ids = torch.arange(8)[None]
    first, same, other = (logits(model, ids) for model in made)
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_making_one_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    target, _ = training.pair(tmp_path)
    shape = config_file(tmp_path)
    before = torch.random.get_rng_state()
    training.load_draft(target=target, init=shape)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_draft_of_another_width_gets_the_targets(tmp_path: Path) -> None:
    target = training.target_folder(tmp_path / "target", vocab_size=tiny.VOCAB_SIZE + 12)
    for width in (tiny.VOCAB_SIZE, tiny.VOCAB_SIZE + 40):
        folder = training.draft_folder(tmp_path / f"draft-{width}", vocab_size=width)
        draft = training.load_draft(target=target, draft=folder)
        known = AutoModelForCausalLM.from_pretrained(folder)
        ids = torch.arange(20)[None]
        ours, theirs = logits(draft.model, ids), logits(known, ids)
        assert ours.shape[-1] == tiny.VOCAB_SIZE + 12
        torch.testing.assert_close(ours[..., : tiny.VOCAB_SIZE], theirs[..., : tiny.VOCAB_SIZE])


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    target, draft = training.pair(tmp_path)
    tiny.backend(("<other>",)).save_pretrained(draft)
    with pytest.raises(IncompatibleDraft, match=r"<other>.*made from nothing"):
        training.load_draft(target=target, draft=draft)


@pytest.mark.parametrize("family", ["granite", "gemma3", "opt"])
def test_what_is_more_than_head_and_decoder_is_refused(tmp_path: Path, family: str) -> None:
    """Granite scales its logits, Gemma caps them, OPT does not keep packed texts apart."""
    target, _ = training.pair(tmp_path)
    folder = tmp_path / family
    tiny.network(family).save_pretrained(folder)
    tiny.backend().save_pretrained(folder)
    with pytest.raises(InvalidModel, match="cannot be trained as a draft"):
        training.load_draft(target=target, draft=folder)


def test_nothing_to_begin_with(tmp_path: Path) -> None:
    target, _ = training.pair(tmp_path)
    with pytest.raises(InvalidModel, match="neither"):
        training.load_draft(target=target)
    shape = tmp_path / "shape.json"
    with pytest.raises(InvalidModel, match="is missing"):
        training.load_draft(target=target, init=shape)
    shape.write_text("{}")
    with pytest.raises(InvalidModel, match="model_type ''"):
        training.load_draft(target=target, init=shape)
    shape.write_text('{"model_type": "no-such"}')
    with pytest.raises(InvalidModel, match="model_type 'no-such'"):
        training.load_draft(target=target, init=shape)
    shape.write_text('{"model_type": "rwkv", "hidden_size": 16, "num_hidden_layers": 1}')
    with pytest.raises(InvalidModel, match="Rwkv"):
        training.load_draft(target=target, init=shape)


def test_a_full_disk_leaves_the_draft_there_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = training.tiny_draft(tmp_path)
    weights = weights_of(draft)
    out = tmp_path / "trained"
    draft.save(out, weights)
    kept = (out / "model.safetensors").read_bytes()

    def full(weights: object, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(draft, "write", full)
    with pytest.raises(OSError, match="No space left"):
        draft.save(out, {name: tensor + 1 for name, tensor in weights.items()})
    assert (out / "model.safetensors").read_bytes() == kept
    monkeypatch.undo()
    draft.save(out, {name: tensor + 1 for name, tensor in weights.items()})
    assert (out / "model.safetensors").read_bytes() != kept
