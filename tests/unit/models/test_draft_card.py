"""Cards survive a round trip, and notice every change of the target but a touched file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.errors import InvalidModel
from forerun.models.draft_card import (
    CARD_FILE,
    CardFigures,
    DraftCard,
    TargetIdentity,
    identify,
    read_card,
    staleness,
    write_card,
)
from forerun.theory.intervals import Interval

FIGURES = CardFigures(
    temperature=0.0,
    num_speculative_tokens=5,
    acceptance_length=Interval(estimate=2.7, low=2.6, high=2.8),
    acceptance_probability=None,
    speedup=Interval(estimate=1.9, low=1.8, high=2.0),
)


def card_for(identity: TargetIdentity) -> DraftCard:
    return DraftCard(
        target="some/target",
        target_hash="a" * 16,
        made_for=identity,
        data_hash="d" * 16,
        objective="lk",
        temperature=1.0,
        after=(FIGURES,),
        versions={"torch": "2"},
        date="2026-11-21T20:00:00+00:00",
        settings={"training": {"num_steps": 3}},
    )


@pytest.fixture
def draft(folder: Path, tmp_path: Path) -> Path:
    """A folder with a card for the target in `folder`."""
    path = tmp_path / "draft"
    path.mkdir()
    write_card(card_for(identify(folder)), path)
    return path


def test_what_is_written_is_read(draft: Path, folder: Path) -> None:
    assert read_card(draft) == card_for(identify(folder))
    assert [path.name for path in draft.iterdir()] == [CARD_FILE]


def test_most_drafts_have_none(tmp_path: Path) -> None:
    assert read_card(tmp_path) is None


def test_what_a_later_version_adds_is_left_out(draft: Path) -> None:
    values = json.loads((draft / CARD_FILE).read_text())
    (draft / CARD_FILE).write_text(json.dumps({**values, "novelty": 1}))
    assert read_card(draft) is not None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ('{"format": 2}', "is of format 2, this forerun reads up to 1"),
        ('{"target": "x"}', "is of format None"),
        ('{"format": 1, "target": "x"}', "is damaged"),
    ],
)
def test_a_card_that_makes_no_sense(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / CARD_FILE).write_text(content)
    with pytest.raises(InvalidModel, match=message):
        read_card(tmp_path)


def tune(folder: Path) -> None:
    """As a fine-tune of one matrix would."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    noise = torch.empty_like(weights["model.layers.1.mlp.up_proj.weight"])
    noise.normal_(generator=torch.Generator().manual_seed(0))
    weights["model.layers.1.mlp.up_proj.weight"] += 1e-3 * noise
    save_file(weights, path, metadata={"format": "pt"})


def change_tokenizer(folder: Path) -> None:
    with (folder / "tokenizer.json").open("a") as file:
        file.write(" ")


def change_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")


@pytest.mark.parametrize(
    ("change", "named"),
    [(tune, "weights"), (change_tokenizer, "tokenizer"), (change_template, "chat template")],
)
def test_every_change_of_the_target_is_named(
    draft: Path, folder: Path, change: Callable[[Path], None], named: str
) -> None:
    assert staleness(draft, folder) is None
    change(folder)
    message = staleness(draft, folder)
    assert message is not None
    assert f"{folder} has other {named}: " in message
    assert f"forerun align --refresh {draft} --target {folder} --prompts" in message


def test_a_copy_of_the_target_is_the_target(draft: Path, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    save_file(load_file(folder / "model.safetensors"), tmp_path / "copy" / "model.safetensors")
    assert staleness(draft, tmp_path / "copy") is None


def test_drafts_without_a_card_are_never_stale(folder: Path) -> None:
    assert staleness(folder, folder) is None
