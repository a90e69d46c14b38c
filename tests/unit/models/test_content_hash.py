"""Hashes follow content, not names or times."""

from __future__ import annotations

import json

import pytest

from forerun.errors import InvalidModel
from forerun.models.checkpoint import ModelFiles, weights_hash


def test_weights_hash_follows_the_bytes(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"one")
    b.write_bytes(b"two")
    before = weights_hash([a, b])
    assert len(before) == 16
    assert weights_hash([b, a]) == before
    b.touch()
    assert weights_hash([a, b]) == before
    a.write_bytes(b"onetw")
    b.write_bytes(b"o")
    assert weights_hash([a, b]) != before


def test_tokenizer_hash_follows_tokenizer_json(folder):
    before = ModelFiles.find(folder).tokenizer_hash
    (folder / "config.json").write_text("{}")
    assert ModelFiles.find(folder).tokenizer_hash == before
    with (folder / "tokenizer.json").open("a") as file:
        file.write(" ")
    assert ModelFiles.find(folder).tokenizer_hash != before


def test_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(InvalidModel, match=r"tokenizer\.json is missing"):
        _ = ModelFiles.find(tmp_path).tokenizer_hash


def test_template_hash_follows_the_template_wherever_it_is(folder):
    none = ModelFiles.find(folder).template_hash
    found = {none}
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for template in ("{{ messages }}", [{"name": "default", "template": "{{ messages }}"}]):
        content = json.dumps(settings | {"chat_template": template})
        (folder / "tokenizer_config.json").write_text(content)
        found.add(ModelFiles.find(folder).template_hash)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"unk_token": "?"}))
    assert ModelFiles.find(folder).template_hash == none
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    found.add(ModelFiles.find(folder).template_hash)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    found.add(ModelFiles.find(folder).template_hash)
    assert len(found) == 5
    assert all(len(one) == 16 for one in found)


def test_template_hash_without_a_tokenizer_is_that_of_nothing(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    assert (
        ModelFiles.find(tmp_path / "empty").template_hash == ModelFiles.find(folder).template_hash
    )


def test_template_hash_of_damaged_settings(folder):
    (folder / "tokenizer_config.json").write_text("[")
    with pytest.raises(InvalidModel, match=r"tokenizer_config\.json cannot be read"):
        _ = ModelFiles.find(folder).template_hash
