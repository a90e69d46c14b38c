"""Hashes follow content, not names or times."""

from __future__ import annotations

import json

import pytest

from forerun.errors import InvalidModel
from forerun.models.checkpoint import template_hash, tokenizer_hash, weights_hash


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
    before = tokenizer_hash(folder)
    (folder / "config.json").write_text("{}")
    assert tokenizer_hash(folder) == before
    with (folder / "tokenizer.json").open("a") as file:
        file.write(" ")
    assert tokenizer_hash(folder) != before


def test_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(InvalidModel, match=r"tokenizer\.json is missing"):
        tokenizer_hash(tmp_path)


def test_template_hash_follows_the_template_wherever_it_is(folder):
    none = template_hash(folder)
    found = {none}
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for template in ("{{ messages }}", [{"name": "default", "template": "{{ messages }}"}]):
        content = json.dumps(settings | {"chat_template": template})
        (folder / "tokenizer_config.json").write_text(content)
        found.add(template_hash(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"unk_token": "?"}))
    assert template_hash(folder) == none
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    found.add(template_hash(folder))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    found.add(template_hash(folder))
    assert len(found) == 5
    assert all(len(one) == 16 for one in found)


def test_template_hash_without_a_tokenizer_is_that_of_nothing(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    assert template_hash(tmp_path / "empty") == template_hash(folder)


def test_template_hash_of_damaged_settings(folder):
    (folder / "tokenizer_config.json").write_text("[")
    with pytest.raises(InvalidModel, match=r"tokenizer_config\.json cannot be read"):
        template_hash(folder)
