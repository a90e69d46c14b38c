"""Configurations understood once: what is kept, and what is not believed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from forerun.errors import InvalidModel
from forerun.models import checkpoint as checkpoints
from forerun.models.checkpoint import ModelFiles, read_settings


@pytest.fixture
def checkpoint(folder: Path) -> ModelFiles:
    return ModelFiles.open(folder)


@pytest.fixture
def never(monkeypatch) -> None:
    """From here on nothing is understood anew."""
    monkeypatch.setattr(checkpoints, "understood", lambda _: pytest.fail("understood again"))


def understood_by_transformers(folder: Path) -> dict[str, object]:
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    return json.loads(json.dumps(config.to_dict(), default=str))


def test_kept_settings_are_those_of_transformers(checkpoint, tmp_path, request):
    expected = understood_by_transformers(checkpoint.folder)
    assert expected["rope_parameters"]["rope_type"] == "default"  # a default filled in
    assert read_settings(checkpoint, tmp_path / "cache") == expected
    request.getfixturevalue("never")
    assert read_settings(checkpoint, tmp_path / "cache") == expected


def test_the_same_file_elsewhere_is_the_same(checkpoint, intact_folder, tmp_path, request):
    expected = read_settings(checkpoint, tmp_path / "cache")
    request.getfixturevalue("never")
    assert read_settings(ModelFiles.open(intact_folder), tmp_path / "cache") == expected


def test_another_configuration_is_understood_anew(checkpoint, configure, tmp_path):
    read_settings(checkpoint, tmp_path / "cache")
    configure(rms_norm_eps=0.25)
    changed = ModelFiles.open(checkpoint.folder)
    assert read_settings(changed, tmp_path / "cache")["rms_norm_eps"] == 0.25


def test_another_version_of_transformers_understands_anew(checkpoint, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    read_settings(checkpoint, cache)
    monkeypatch.setattr(checkpoints, "version", lambda name: f"{name} 99")
    monkeypatch.setattr(checkpoints, "understood", lambda _: {"new": True})
    assert read_settings(checkpoint, cache) == {"new": True}
    monkeypatch.undo()
    assert read_settings(checkpoint, cache) == understood_by_transformers(checkpoint.folder)


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", "null", '{"vocab_size": 3}'])
def test_damaged_settings_are_understood_anew_and_mended(checkpoint, tmp_path, content, request):
    expected = read_settings(checkpoint, tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_text(content)
    assert read_settings(checkpoint, tmp_path / "cache") == expected
    request.getfixturevalue("never")
    assert read_settings(checkpoint, tmp_path / "cache") == expected


def test_a_cache_that_cannot_be_written_costs_time_only(checkpoint, tmp_path, caplog):
    """A file where the folder should be: read-only folders do not stop root."""
    (tmp_path / "file").write_text("")
    expected = understood_by_transformers(checkpoint.folder)
    assert read_settings(checkpoint, tmp_path / "file" / "cache") == expected
    assert not caplog.records


def test_what_is_refused_is_not_kept(checkpoint, configure, tmp_path):
    configure(num_attention_heads="many")
    for _ in range(2):
        with pytest.raises(InvalidModel, match="is refused"):
            read_settings(checkpoint, tmp_path / "cache")
    assert not [*tmp_path.glob("cache/*")]
