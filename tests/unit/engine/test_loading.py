"""From folders to an engine: what fits together, what is refused, what is warned of."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests import heads, tiny
from tests.cards import card_for

from forerun.drafters import registry
from forerun.drafters.eagle3.load import load_eagle3, write_eagle3_head
from forerun.drafters.foreign import SharedTokenDraft
from forerun.drafters.medusa import MedusaConfig, MedusaHeads, load_medusa, write_medusa
from forerun.drafters.suffix import SuffixDrafter
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.errors import (
    InvalidModel,
    InvalidRequest,
    NotEnoughMemory,
    UnsupportedFeatures,
)
from forerun.models import memory
from forerun.models.checkpoint import ModelFiles
from forerun.models.draft_card import CARD_FILE, TargetIdentity, identify, write_card
from forerun.sampling.config import SamplingParams

CONFIG = tiny.settings()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Saves a network with a tokenizer."""

    def save(name: str, *, extra: tuple[str, ...] = (), **network: float) -> Path:
        path = tmp_path_factory.mktemp(name)
        tiny.network(**network).save_pretrained(path)
        tiny.backend(extra).save_pretrained(path)
        return path

    return save


@pytest.fixture(scope="module")
def target(folder: Callable[..., Path]) -> Path:
    return folder("target")


@pytest.fixture(scope="module")
def draft(folder: Callable[..., Path]) -> Path:
    return folder("draft", seed=9, num_layers=1)


def load(target: Path, draft: Path | None = None, config: EngineConfig = CONFIG) -> Engine:
    return Engine.load(target, draft, device="cpu", dtype="fp32", config=config)


def test_a_pair_from_folders_says_what_the_target_says(target, draft, caplog):
    caplog.set_level(logging.WARNING)
    pair = load(target, draft)
    params = SamplingParams(seed=1, max_tokens=8)
    expected = tiny.engine_over(tiny.adapted(tiny.network())).generate(tiny.PROMPTS, params)
    found = pair.generate(tiny.PROMPTS, params)
    assert [output.text for output in found] == [output.text for output in expected]
    assert found[0].completions[0].acceptance.num_drafted > 0
    assert pair.eos_token_ids == {tiny.EOS}
    assert not caplog.records


def test_another_draft_for_the_same_loaded_target(target, draft):
    plain = load(target)
    pair = plain.with_draft(draft, 2)
    assert pair.target is plain.target
    assert plain.drafter is None
    assert pair.drafter is not None
    assert pair.config.num_speculative_tokens == 2
    assert pair.with_draft(None).drafter is None


def test_a_draft_with_another_tokenizer_drafts_the_tokens_that_both_have(target, folder):
    stranger = folder("stranger", extra=("<first>", "<second>"))
    pair = load(target, stranger)
    assert isinstance(pair.drafter, SharedTokenDraft)
    assert len(pair.drafter.vocabulary.shared) == len(tiny.backend())
    params = SamplingParams(seed=1, max_tokens=8)
    found = pair.generate(tiny.PROMPTS, params)
    expected = load(target).generate(tiny.PROMPTS, params)
    assert [output.text for output in found] == [output.text for output in expected]
    assert found[0].completions[0].acceptance.num_drafted > 0


def test_a_draft_as_large_as_the_target_is_warned_of(target, folder, caplog):
    caplog.set_level(logging.WARNING)
    load(target, folder("large", num_layers=3))
    (record,) = caplog.records
    assert "drafting will cost more than it saves" in record.getMessage()


def test_k_beyond_the_context_is_refused(target, draft):
    k = tiny.MAX_CONTEXT
    config = tiny.settings(k, max_step_rows=4 * (k + 1))
    with pytest.raises(InvalidRequest, match=f"num_speculative_tokens is {k}.*holds 96 tokens"):
        load(target, draft, config)
    with pytest.raises(InvalidRequest, match=f"num_speculative_tokens is {k}"):
        load(target).with_draft(draft, k)


def test_k_below_zero_is_refused(target, draft):
    with pytest.raises(InvalidRequest, match="num_speculative_tokens is -1"):
        load(target).with_draft(draft, -1)


def test_a_missing_folder_is_named_and_nothing_else_is_said(target, tmp_path, caplog):
    with pytest.raises(InvalidModel, match="nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(InvalidModel, match="nowhere"):
        load(target, tmp_path / "nowhere")
    assert not caplog.records


def test_too_little_memory_is_said_beforehand(target, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1000)
    with pytest.raises(NotEnoughMemory, match="target"):
        load(target)


@pytest.mark.parametrize(
    ("file", "listed", "expected"),
    [
        ("config.json", 5, {0, 5}),
        ("config.json", [5, 6], {0, 5, 6}),
        ("generation_config.json", [7], {0, 7}),
        ("generation_config.json", None, {0}),
    ],
)
def test_every_end_of_text_any_file_names_counts(folder, file, listed, expected):
    path = folder("ends")
    settings = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps(settings | {"eos_token_id": listed}))
    assert ModelFiles.open(path).eos_token_ids(tiny.tokenizer()) == expected


@pytest.mark.parametrize("listed", [[[1]], {"a": 1}, "x", 1.5, True, [10**30]])
def test_an_end_of_text_that_is_no_token_is_refused(folder, listed):
    path = folder("ends")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    with pytest.raises(InvalidModel, match="must be a token id or a list"):
        ModelFiles.open(path).eos_token_ids(tiny.tokenizer())


def test_a_target_that_changed_since_the_draft_was_aligned_is_warned_of(target, draft, caplog):
    """A warning, at every start, and nothing else: the text stays exact."""
    made_for = identify(target)
    card = card_for(made_for)
    try:
        write_card(card, draft)
        load(target, draft)
        assert not caplog.records
        write_card(replace(card, made_for=replace(made_for, weights="others")), draft)
        load(target, draft)
        (record,) = caplog.records
        assert "aligned to my/target" in record.message and "has other weights" in record.message
        (draft / CARD_FILE).write_text("{")
        load(target, draft)
        assert "the draft's card is of no use" in caplog.records[-1].message
    finally:
        (draft / CARD_FILE).unlink()


def head_in(folder: Path, kind: str, made_for: TargetIdentity | None) -> Path:
    """A random head for the tiny network, with a card or without."""
    if kind == "medusa":
        config = MedusaConfig(hidden_size=32, vocab_size=tiny.VOCAB_SIZE, num_heads=2)
        write_medusa(MedusaHeads(config), folder, target="my/target")
    else:
        head = heads.eagle3_head(tiny.adapted(tiny.network()), feature_layers=(0, 1, 2))
        write_eagle3_head(head, folder, target="my/target")
    if made_for is not None:
        write_card(card_for(made_for), folder)
    return folder


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_head_whose_card_names_another_target_is_loaded_with_a_warning(
    target, tmp_path, kind, caplog
):
    made_for = identify(target)
    load(target, head_in(tmp_path / "bare", kind, None))
    load(target, head_in(tmp_path / "fitting", kind, made_for))
    assert not caplog.records
    load(target, head_in(tmp_path / "template", kind, replace(made_for, template="others")))
    assert "has other chat template" in caplog.records[-1].message
    load(target, head_in(tmp_path / "other", kind, replace(made_for, weights="a1b2c3")))
    assert "has other weights" in caplog.records[-1].message


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_target_that_cannot_give_what_a_head_uses_is_refused(tmp_path, kind, monkeypatch):
    def refuse(*_: object) -> None:
        raise UnsupportedFeatures("the model has none")

    model = tiny.adapted(tiny.network())
    monkeypatch.setattr(model, "embed" if kind == "eagle3" else "head", refuse)
    loader = load_eagle3 if kind == "eagle3" else load_medusa
    with pytest.raises(UnsupportedFeatures, match="the model has none"):
        loader(head_in(tmp_path, kind, None), model)


def test_a_registered_checkpoint_type_is_loaded_by_its_loader(target, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "METHODS", [])
    (tmp_path / "config.json").write_text('{"architectures": ["Heads"]}')
    loaded = []

    def load(folder, model):
        loaded.append((folder, model.vocab_size))
        return SuffixDrafter()

    registry.register_checkpoint(lambda config: config.get("architectures") == ["Heads"], load)
    engine = Engine.load(target, draft=tmp_path, config=CONFIG)
    assert engine.generate(["a b"], SamplingParams(max_tokens=4))
    assert loaded == [(tmp_path, engine.target.vocab_size)]
