"""Tokens per second of a batch of unequal prompts against one prompt at a time.

Plain and speculative; a block is one prompt alone and then `--batch` prompts of different lengths
together. Greedy; prefill is counted, so this is what a queue of requests sees.

    python benchmarks/speed/ragged_batch.py --target TARGET --draft DRAFT --out FILE
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.provenance import collect, content_hash
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import bootstrap_ratio

SHORTEST = 32


def prompts_of(lengths: Sequence[int], vocab_size: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.empty(length, dtype=torch.int64).random_(3, vocab_size, generator=generator).tolist()
        for length in lengths
    ]


def tokens_per_s(engine: Engine, prompts: Sequence[list[int]], num_tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    started_s = time.perf_counter()
    outputs = engine.generate(prompts, params)
    seconds = time.perf_counter() - started_s
    return sum(len(output.completions[0].token_ids) for output in outputs) / seconds


def measure(engine: Engine, options: argparse.Namespace) -> dict[str, object]:
    step = (options.longest - SHORTEST) // (options.batch - 1)
    lengths = [SHORTEST + step * i for i in range(options.batch)]
    alone, together = [], []
    for block in range(options.blocks + 1):
        prompts = prompts_of(lengths, engine.target.vocab_size, block)
        one = [prompts[(3 * block) % len(prompts)]]  # lengths in turn
        rates = [tokens_per_s(engine, texts, options.max_tokens) for texts in (one, prompts)]
        if block:  # the first warms up
            alone.append(rates[0])
            together.append(rates[1])
    ratio = bootstrap_ratio(together, alone, seed=0)
    return {
        "prompt_lengths": lengths,
        "alone_tokens_per_s": sum(alone) / len(alone),
        "together_tokens_per_s": sum(together) / len(together),
        "ratio": [ratio.estimate, ratio.low, ratio.high],
        "blocks": [*zip(alone, together, strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None, help="write JSON here too")
    options = parser.parse_args()
    config = EngineConfig(
        controller="fixed",
        num_speculative_tokens=options.k,
        max_batch=options.batch,
        max_context=options.longest + options.max_tokens,
        num_threads=options.threads,
        sharing="none",
    )
    speculative = Engine.load(options.target, options.draft, config=config)
    plain = speculative.with_draft(None)
    content = {
        "arguments": sys.argv[1:],
        "plain": measure(plain, options),
        "speculative": measure(speculative, options),
        "config": repr(config),
        "provenance": collect(
            {name: content_hash(name) for name in (options.target, options.draft)}, options.threads
        ).to_dict(),
    }
    text = json.dumps(content, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
