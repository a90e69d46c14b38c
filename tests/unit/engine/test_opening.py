"""A model's files are found, read and checked once per `Engine.load`."""

from __future__ import annotations

import builtins
import io
import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from tests import tiny
from tests.gguf_files import all_of, write_gguf, write_tiny_folder

import forerun
from forerun.engine.engine import Engine
from forerun.errors import InvalidModel, InvalidRequest

SOURCE = Path(forerun.__file__).parent
MOST_READS = {"config.json": 2, "generation_config.json": 1, "tokenizer.json": 2}
"""A second time for the hash by which a tokenizer is cached, and by which drafts know it."""


@pytest.fixture
def opened(monkeypatch):
    """Counts of the files that Python code opens, by path."""
    counts: Counter[str] = Counter()

    def counted(plain):
        def count(file, *args, **kwargs):
            if isinstance(file, str | os.PathLike):
                counts[os.fspath(file)] += 1
            return plain(file, *args, **kwargs)

        return count

    for module in (io, os, builtins):
        monkeypatch.setattr(module, "open", counted(module.open))
    return counts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny.network().save_pretrained(path)
    tiny.backend().save_pretrained(path)
    (path / "generation_config.json").write_text("{}")
    return path


def load(target, draft=None):
    return Engine.load(target, draft, config=tiny.settings(), dtype="float32", device="cpu")


@pytest.mark.parametrize("draft", [None, "suffix", "draft"])
def test_configurations_are_read_once(folder, draft, tmp_path, opened):
    load(folder, None if draft is None else "suffix")  # fills the caches of settings and tokenizer
    other = shutil.copytree(folder, tmp_path / "draft")
    opened.clear()
    load(folder, str(other) if draft == "draft" else draft)
    for place in (folder, other) if draft == "draft" else (folder,):
        counts = {name: opened[str(place / name)] for name in MOST_READS}
        assert all(counts[name] <= most for name, most in MOST_READS.items()), counts


def test_a_gguf_file_is_opened_once(tmp_path, opened):
    path = write_gguf(
        tmp_path / "m.gguf", write_tiny_folder(tmp_path / "folder"), all_of(Kind.Q8_0)
    )
    opened.clear()
    Engine.load(path, "suffix")
    Engine.load(path, "self:int4")
    assert opened[str(path)] == 1


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        ("suffix:x", "takes no argument"),
        ("mtp:/nope", "no model folder /nope"),
        ("mtp", "brings no multi-token-prediction"),
        ("sufix", "did you mean suffix.*recycling, self:int4"),
        ("recycling:3", "takes no argument"),
        ("self:0", "self:0 drafts with 0"),
        ("self:int5", "there is no draft self:int5"),
        ("/no/such/draft", "no model folder"),
    ],
)
def test_drafts_that_cannot_exist_are_refused_before_weights_are_read(
    folder, draft, said, monkeypatch
):
    monkeypatch.delattr("forerun.engine.loading.load_model")
    monkeypatch.setattr("huggingface_hub.snapshot_download", pytest.fail)
    with pytest.raises((InvalidModel, InvalidRequest), match=said) as caught:
        load(folder, draft)
    assert "\n" not in str(caught.value)


def test_a_draft_without_weights_is_refused_before_those_of_the_target(
    folder, tmp_path, monkeypatch
):
    monkeypatch.delattr("forerun.engine.loading.load_model")
    draft = shutil.copytree(folder, tmp_path / "draft")
    (draft / "model.safetensors").unlink()
    with pytest.raises(InvalidModel, match="lacks its weights"):
        load(folder, str(draft))


def test_only_model_files_knows_what_a_name_can_be():
    callers = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"(?<!def )\bmodel_folder\(", path.read_text())
    }
    assert callers == {"models/checkpoint.py"}


MOST_FILES = 32
"""Source files that loading a GGUF file enters; lower it when there are fewer."""


def test_few_source_files_are_entered_by_loading_a_file(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf", write_tiny_folder(tmp_path / "folder"), all_of(Kind.Q8_0)
    )
    Engine.load(path)  # fills the caches
    files = set()
    sys.setprofile(
        lambda frame, event, _: files.add(frame.f_code.co_filename) if event == "call" else None
    )
    try:
        Engine.load(path)
    finally:
        sys.setprofile(None)
    entered = {name for name in files if name.startswith(str(SOURCE))}
    assert len(entered) <= MOST_FILES, sorted(entered)
