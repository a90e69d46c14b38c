"""Names of the zoo, what is said of models that are not there, and what the wheel holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.errors import InvalidModel
from forerun.models import catalog
from forerun.models.catalog import model_folder

ROOT = Path(__file__).parents[3]
ZOO = "forerun/models/zoo"
WITH_WEIGHTS = {"eagle3-for-smollm2-135m"}
"""Folders of the zoo that the wheel may have."""


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


@pytest.mark.parametrize("name", catalog.ZOO)
def test_models_of_a_checkout_are_named_as_such(shelf, name):
    """An installed package has none of them."""
    with pytest.raises(InvalidModel, match=f"^zoo:{name} is part of a checkout .*zoo:smollm2-135m"):
        catalog.zoo_path(name)


def test_the_wheel_is_small_and_has_no_test_model():
    """The build backend itself lists the files; a wheel compresses them, so it is smaller still."""
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    sizes = {
        file.distribution_path: Path(file.path).stat().st_size
        for file in builder.recurse_included_files()
    }
    in_zoo = {path.removeprefix(f"{ZOO}/") for path in sizes if path.startswith(f"{ZOO}/")}
    assert in_zoo >= {"chats.jsonl", "prompts.jsonl", "LICENSE-PSF-2.0.txt"}
    assert {name.partition("/")[0] for name in in_zoo if "/" in name} <= WITH_WEIGHTS
    assert sum(sizes.values()) <= 25_000_000
    assert sum(n for path, n in sizes.items() if path.startswith(f"{ZOO}/")) <= 8_500_000
    assert {"forerun/py.typed", "forerun/native/kernels/cycles.h"} <= sizes.keys()


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
