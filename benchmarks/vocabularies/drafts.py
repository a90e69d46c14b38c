"""Trains three small drafts whose tokenizers differ from that of the shipped targets.

    python benchmarks/vocabularies/drafts.py OUT --corpora FOLDER [--seconds 200]

Each starts from the layers of zoo:code-2m, with the mean of the embeddings that its tokens' texts
have there, and is trained on Python source for a few minutes of one core. The tokenizers: a
byte-level BPE of 3,000 tokens, a SentencePiece-like BPE of 4,000 with byte tokens, and characters.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from forerun.models.catalog import zoo_path

sys.path.append(str(Path(__file__).parents[2] / "recipes" / "zoo"))
from corpus import split_documents, stdlib_files

END = "<|end|>"
CONTEXT = 2048


def texts(corpora: Path) -> list[str]:
    """Standard library without its held-out modules, and TheAlgorithms."""
    algorithms = (corpora / "thealgorithms-python.txt").read_text("utf-8")
    library = list(stdlib_files(tests=False, held_out=False))
    return [*library, *split_documents(algorithms)]


def byte_level(documents: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(documents[::3], trainer)
    return tokenizer


def sentencepiece(documents: list[str]) -> Tokenizer:
    """As Llama 2 has it: spaces as "▁", one of them before the text, and byte tokens."""
    words = Regex(r" *[^\s]+|\n+| +")
    pre = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
        ]
    )
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre
    trainer = trainers.BpeTrainer(vocab_size=3740, limit_alphabet=200, special_tokens=["<unk>"])
    trained.train_from_iterator(documents[::3], trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", END, *[f"<0x{byte:02X}>" for byte in range(256)]]
    pieces += [piece for piece in model["vocab"] if piece != "<unk>"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<unk>", END])
    return tokenizer


def characters(documents: list[str]) -> Tokenizer:
    """Printable ASCII and newline; every other character is unknown."""
    pieces = ["<unk>", END, "\n", *map(chr, range(0x20, 0x7F))]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>", END])
    return tokenizer


KINDS = {"bytes-3k": byte_level, "sentencepiece-4k": sentencepiece, "characters": characters}


def started(tokenizer: Tokenizer) -> torch.nn.Module:
    """zoo:code-2m with another vocabulary."""
    folder = zoo_path("code-2m")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    own = AutoTokenizer.from_pretrained(folder)
    known = model.get_input_embeddings().weight.detach()
    table = known.mean(0).repeat(tokenizer.get_vocab_size(), 1)
    for token in range(tokenizer.get_vocab_size()):
        ids = own.encode(tokenizer.decode([token]) or " ", add_special_tokens=False)
        table[token] = known[ids].mean(0)
    model.resize_token_embeddings(len(table))
    model.get_input_embeddings().weight.data.copy_(table)
    end = tokenizer.token_to_id(END)
    for settings in (model.config, model.generation_config):
        settings.eos_token_id = settings.bos_token_id = end
    model.config.max_position_embeddings = CONTEXT
    return model


def windows(tokens: torch.Tensor, size: int, batch: int, seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.empty(batch).random_(len(tokens) - size - 1, generator=generator).long()
        yield torch.stack([tokens[start : start + size + 1] for start in starts.tolist()])


def train(model: torch.nn.Module, tokens: torch.Tensor, size: int, seconds: float) -> list[float]:
    """Train until the time is used up; returns the losses, in nats per token."""
    rate = 2e-3
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    begun, losses = time.monotonic(), []
    for rows in windows(tokens, size, 4096 // size, seed=0):
        share = (time.monotonic() - begun) / seconds
        if share >= 1:
            return losses
        optimiser.param_groups[0]["lr"] = rate * min(1, 20 * share + 0.05, 2 * (1 - share) + 0.02)
        logits = model(rows[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(float(loss))
    return losses


def build(kind: str, corpora: Path, out: Path, seconds: float) -> None:
    documents = texts(corpora)
    tokenizer = KINDS[kind](documents)
    end = tokenizer.token_to_id(END)
    encoded = tokenizer.encode_batch(documents, add_special_tokens=False)
    tokens = torch.tensor([token for found in encoded for token in (end, *found.ids)])
    size = 512 if kind == "characters" else 256
    model = started(tokenizer).train()
    losses = train(model, tokens, size, seconds)
    recent = losses[-20:]
    tokens_per_byte = len(tokens) / sum(len(text.encode()) for text in documents)
    nats_per_byte = sum(recent) / len(recent) * tokens_per_byte
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, model_max_length=CONTEXT
    ).save_pretrained(out / kind)
    model.save_pretrained(out / kind)
    about = {"steps": len(losses), "seconds": seconds, "bits_per_byte": nats_per_byte / 0.6931}
    (out / kind / "about.json").write_text(json.dumps(about))
    print(kind, about, f"{len(tokens):,} tokens", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    for kind in args.kinds:
        build(kind, args.corpora, args.out, args.seconds)


if __name__ == "__main__":
    main()
