"""A tiny model folder to load, and to damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests import tiny
from transformers import LlamaConfig, LlamaForCausalLM, TokenizersBackend

from forerun.models.tokenizers import Tokenizer, adopt

CONFIG = LlamaConfig(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=128,
)
CORPUS = ["def add(left, right):\n    return left + right\n", "héllo wörld 😀 … naïve\n"] * 3


def byte_level_backend() -> TokenizersBackend:
    return tiny.byte_level_bpe(CORPUS, extra=("<tool call>",))


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """A byte-level BPE with a special token (id 0) and an added one that is plain text."""
    return adopt(byte_level_backend())


@pytest.fixture(scope="session")
def intact_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("intact")
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(folder)
    byte_level_backend().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(intact_folder: Path, tmp_path: Path) -> Path:
    """A copy of a good model folder, to be changed at will."""
    return Path(shutil.copytree(intact_folder, tmp_path / "model"))


@pytest.fixture
def configure(folder: Path) -> Callable[..., None]:
    """Changes settings in the folder's config.json."""

    def change(**settings: object) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    return change
