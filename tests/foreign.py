"""Tokenizers of different kinds, and drafts whose vocabulary is not the target's."""

from __future__ import annotations

import json
from functools import cache

import torch
from tests import tiny
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedModel, TokenizersBackend

from forerun.models.tokenizers import Tokenizer, adopt

END = "<|end|>"
SPACE = "\u2581"
TEXTS = (
    *tiny.CORPUS,
    "Total: 1234567 \u4e2d\u6587 na\u00efve return returned  two  spaces\n\n\tx\n",
)


def wrapped(backend: Backend, end: str = END) -> Tokenizer:
    return adopt(TokenizersBackend(tokenizer_object=backend, eos_token=end))


@cache
def byte_level(size: int = 270, end: str = END) -> Tokenizer:
    """Byte-level BPE of another size than the target's."""
    return adopt(tiny.byte_level_bpe(TEXTS[2:], size, end=end))


def byte_level_with(special: str) -> Tokenizer:
    """Byte-level BPE with one more special token, which does not end texts."""
    backend = Backend.from_str(byte_level().definition.content)
    backend.add_special_tokens([special])
    return wrapped(backend)


def pieces_of(text: str) -> list[str]:
    """Words with their space, as SentencePiece writes them, and all characters."""
    words = [SPACE + word for word in text.split()]
    return [*dict.fromkeys([*sorted({*text.replace(" ", SPACE)}), *words])]


@cache
def sentencepiece(end: str = "</s>") -> Tokenizer:
    """A space before the text, spaces as a symbol, and tokens for single bytes."""
    single = [f"<0x{byte:02X}>" for byte in range(256)]
    plain = [p for p in pieces_of("".join(TEXTS[:3])) if p != "\n"]
    scores = [("<unk>", 0.0), (end, 0.0), *((piece, -20.0) for piece in single)]
    scores += [(piece, -2.0 if len(piece) > 1 else -5.0) for piece in plain]
    backend = Backend(models.Unigram(scores, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<unk>", end])
    return wrapped(backend, end)


@cache
def characters(extra: str = "\u00e9") -> Tokenizer:
    """One token per printable character of ASCII, newline and `extra`, and none for others."""
    pieces = ["<unk>", END, "\n", *map(chr, range(0x20, 0x7F)), *extra]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<unk>", END])
    return wrapped(backend)


DRAFTS = {"byte-level": byte_level, "sentencepiece": sentencepiece, "characters": characters}


@cache
def permuted(seed: int = 3) -> tuple[Tokenizer, torch.Tensor]:
    """The tiny tokenizer with other ids, and its id of every id of that one."""
    content = json.loads(tiny.tokenizer().definition.content)["model"]
    order = torch.randperm(len(content["vocab"]), generator=torch.Generator().manual_seed(seed))
    vocab = {piece: int(order[token]) for piece, token in content["vocab"].items()}
    backend = Backend(models.BPE(vocab=vocab, merges=[tuple(m) for m in content["merges"]]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    return wrapped(backend), order


def renumbered(network: PreTrainedModel, order: torch.Tensor) -> PreTrainedModel:
    """The network with its tokens under other ids."""
    for layer in (network.get_input_embeddings(), network.get_output_embeddings()):
        layer.weight.data[order] = layer.weight.data[: len(order)].clone()
    return network
