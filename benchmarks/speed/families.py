"""Seconds of a one-row pass by model family: the native runner, the eager one, and Llama natively.

    python benchmarks/speed/families.py --families Gemma3 Olmo2 --out FILE

Random weights of the same width and depth in every family, so these are times and nothing else.
Passes of the models alternate; each continues a text of 256 tokens. `ratio_to_llama` is the time
over Llama's, divided by the ratio of the bytes that a pass reads: 1 is a family that costs what it
reads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from forerun.models.base import Context, LanguageModel, RowBatch, pack
from forerun.models.load import load_model
from forerun.provenance import collect

NUM_TOKENS, NUM_THREADS = 256, 2
SIZES = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
MULTIPLIERS = {
    "attention_multiplier": 0.1,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 704}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "Llama": {},
    "Gemma2": {"sliding_window": 128},
    "Gemma3": {"sliding_window": 128},
    "Granite": MULTIPLIERS,
    "Mistral": {"sliding_window": 128},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 128},
    "Phi3": {},
    "Qwen3Moe": EXPERTS,
    "SmolLM3": {},
}


def save(family: str, folder: str) -> None:
    """Write a random network in bf16."""
    model_class = getattr(transformers, f"{family}ForCausalLM")
    network = model_class(model_class.config_class(**(SIZES | dict(FAMILIES[family]))))
    network.to(torch.bfloat16).save_pretrained(folder)


def loaded(folder: str, runner: str, dtype: str) -> tuple[LanguageModel, RowBatch]:
    """A model behind a text, and a pass of the text's next token."""
    options: dict[str, Any] = {"dtype": dtype, "runner": runner, "num_threads": NUM_THREADS}
    model = load_model(folder, device="cpu", max_batch=1, max_context=512, **options)
    ids = [2 + 7 * place % 1000 for place in range(NUM_TOKENS)]
    context = Context(model.store, ids)
    model.forward(pack([context.span(NUM_TOKENS)], torch.tensor(ids), [0], model.device))
    context.commit(range(NUM_TOKENS))
    context.ids.append(5)
    return model, pack([context.span(1)], torch.tensor([5]), [0], model.device)


def seconds(model: LanguageModel, batch: RowBatch) -> float:
    started_s = time.perf_counter()
    model.forward(batch)
    return time.perf_counter() - started_s


def measure(family: str, llama: str, num_passes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        save(family, folder)
        arms = {
            "native": loaded(folder, "native", "auto"),
            "llama": loaded(llama, "native", "auto"),
            "eager": loaded(folder, "eager", "auto"),
            "eager_fp32": loaded(folder, "eager", "fp32"),
        }
    torch.set_num_threads(NUM_THREADS)
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(num_passes):
        for arm, (model, batch) in arms.items():
            times[arm].append(min(seconds(model, batch) for _ in range(2)))
    found: dict[str, Any] = {f"{a}_s": statistics.median(t) for a, t in times.items()}
    bytes_read = {arm: arms[arm][0].bytes_read for arm in ("native", "llama")}
    share = found["native_s"] / found["llama_s"]
    return found | {
        "bytes_read": bytes_read["native"],
        "parameters": arms["native"][0].num_parameters,
        "gain_over_eager": min(found["eager_s"], found["eager_fp32_s"]) / found["native_s"],
        "ratio_to_llama": share * bytes_read["llama"] / bytes_read["native"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=[*FAMILIES], default=[*FAMILIES])
    parser.add_argument("--passes", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    figures: dict[str, Any] = {"environment": asdict(collect({}, NUM_THREADS))}
    with tempfile.TemporaryDirectory() as llama:
        save("Llama", llama)
        for family in options.families:
            figures[family] = found = measure(family, llama, options.passes)
            print(family, {name: round(value, 5) for name, value in found.items()}, flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1, default=str) + "\n", "utf-8")


if __name__ == "__main__":
    main()
