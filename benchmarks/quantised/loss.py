"""Bits per byte of zoo:code-40m on its held-out prompts, in bf16 and in fewer bits.

python benchmarks/quantised/loss.py
"""

from __future__ import annotations

import math

import torch

from forerun.models.base import Context, LanguageModel, pack
from forerun.models.catalog import held_out_prompts
from forerun.models.load import load_model, load_tokenizer

MODEL = "zoo:code-40m"
NUM_TEXTS = 20


def bits_per_byte(model: LanguageModel, texts: list[tuple[list[int], int]]) -> float:
    nats, num_bytes = 0.0, 0
    for ids, size in texts:
        tokens = torch.tensor(ids)
        context = Context(model.store, ids)
        batch = pack([context.span(len(ids))], tokens, range(len(ids)), model.device)
        rows = model.forward(batch).logits[:-1].log_softmax(-1)
        nats -= float(rows.gather(1, tokens[1:, None]).double().sum())
        num_bytes += size
        context.close()
    return nats / math.log(2) / num_bytes


def main() -> None:
    tokenizer = load_tokenizer(MODEL)
    texts = []
    for prompt in list(held_out_prompts())[:NUM_TEXTS]:
        ids = tokenizer.encode(prompt.text)[:500]
        texts.append((ids, len(tokenizer.decode(ids[1:]).encode())))
    whole = None
    for weights in ("bf16", "int8", "int4-int8", "int4"):
        model = load_model(MODEL, device="cpu", max_batch=1, max_context=512, weights=weights)
        found = bits_per_byte(model, texts)
        whole = whole or found
        print(f"{weights} {found:.4f} bits per byte, {found / whole - 1:+.2%}", flush=True)
    print(f"{sum(size for _, size in texts)} bytes in {len(texts)} texts")


if __name__ == "__main__":
    main()
