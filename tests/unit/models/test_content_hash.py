"""Hashes follow content, not names or times."""

from __future__ import annotations

import pytest

from forerun.errors import InvalidModel
from forerun.models.content_hash import tokenizer_hash, weights_hash


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
