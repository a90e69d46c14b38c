"""Names of the shipped pair, and what is said when it is not there."""

from __future__ import annotations

import json

import pytest

from forerun.errors import InvalidModel
from forerun.models import catalog
from forerun.models.load import model_folder


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    monkeypatch.setattr(catalog, "FOLDER", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", catalog.ZOO)
def test_names_resolve_with_and_without_prefix(shelf, name):
    (shelf / name).mkdir()
    assert catalog.zoo_path(name) == model_folder(f"zoo:{name}") == shelf / name


def test_unknown_name():
    with pytest.raises(
        InvalidModel, match=r"'zoo:lion'; there are zoo:code-40m, zoo:code-2m-for-40m"
    ):
        model_folder("zoo:lion")


def test_missing_weights(shelf):
    with pytest.raises(InvalidModel, match="zoo:code-11m is missing from this installation"):
        catalog.zoo_path("zoo:code-11m")


def test_prompts(shelf):
    lines = [
        json.dumps({"name": "bisect", "text": "def é\n"}),
        json.dumps({"name": "b", "text": ""}),
    ]
    (shelf / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    prompts = catalog.held_out_prompts()
    assert [(p.name, p.text) for p in prompts] == [("bisect", "def é\n"), ("b", "")]


@pytest.mark.parametrize("content", [None, "{", '{"name": "x"}', "[]"])
def test_damaged_prompts(shelf, content):
    if content is not None:
        (shelf / "prompts.jsonl").write_text(content)
    with pytest.raises(InvalidModel, match=r"prompts\.jsonl"):
        catalog.held_out_prompts()
