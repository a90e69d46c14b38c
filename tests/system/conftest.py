"""A tiny pair on disk: random weights, a tokenizer of bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class TinyPair:
    """Folders of models.

    Attributes:
        target: random weights.
        draft: the same with noise, so that it mostly agrees.
        small: of one layer, and other random weights.
        stranger: of another vocabulary.
    """

    target: Path
    draft: Path
    small: Path
    stranger: Path


def byte_tokenizer(extra: tuple[str, ...] = ()):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *extra]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def save_model(folder: Path, *, num_layers: int, seed: int, noise: float = 0.0):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0.0, 0.3, generator=generator)
    jitter = torch.Generator().manual_seed(99)
    for parameter in model.parameters():
        parameter.data += noise * torch.empty_like(parameter).normal_(generator=jitter)
    model.save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory) -> TinyPair:
    root = tmp_path_factory.mktemp("tiny")
    names = ("target", "draft", "small", "stranger")
    pair = TinyPair(**{name: root / name for name in names})
    save_model(pair.target, num_layers=2, seed=0)
    save_model(pair.draft, num_layers=2, seed=0, noise=0.01)
    for folder in (pair.small, pair.stranger):
        save_model(folder, num_layers=1, seed=1)
    for folder in (pair.target, pair.draft, pair.small):
        byte_tokenizer().save_pretrained(folder)
    byte_tokenizer(("zz",)).save_pretrained(pair.stranger)
    return pair


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """24 prompts of two tags, one JSON object per line."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"prompt": f"def f{i}(x):\n", "tag": "odd" if i % 2 else "even"} for i in range(24)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
