"""Time to the first token of a long prompt: read in full, found in the KV, copied within it.

Three arms in turns on prompts of random tokens. "cold": nobody has had the prompt. "hit": the same
prompt again, after it has ended; its place is taken over. "copy": the same prompt again while the
first is still running, so that its KV is copied to another place. "first drafted" is the time to
the end of the first step that drafts, which a cold draft can only do after reading the prompt too.

    python benchmarks/speed/prefix_cache.py --target zoo:code-11m --draft zoo:code-2m
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.provenance import collect, content_hash
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import bootstrap_ratio

ARMS = ("cold", "hit", "copy")
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One prompt in one arm."""

    first_s: float
    first_drafted_s: float
    num_cached: int
    token_ids: tuple[int, ...]


def run(engine: Engine, prompt: Sequence[int]) -> Run:
    started_s = time.perf_counter()
    name = engine.add_request(prompt, PARAMS)
    seconds: list[float] = []
    is_over = False
    while not is_over:
        chunks = [chunk for chunk in engine.step() if chunk.request_id == name]
        seconds += [time.perf_counter() - started_s] * len(chunks)
        is_over = any(chunk.finish_reason is not None for chunk in chunks)
    (completion,) = engine.take_output(name).completions
    return Run(
        first_s=seconds[0],
        first_drafted_s=seconds[1],
        num_cached=completion.num_cached_tokens,
        token_ids=completion.token_ids,
    )


def copied(engine: Engine, prompt: Sequence[int]) -> Run:
    """While another sequence with this prompt is decoding."""
    other = engine.add_request(prompt, SamplingParams(temperature=0, ignore_eos=True))
    while not engine.step():
        pass
    found = run(engine, prompt)
    engine.abort(other)
    return found


def some_prompt(length: int, vocab_size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.empty(length).uniform_(3, vocab_size, generator=generator).int().tolist()
    return ids


def measure(engine: Engine, options: argparse.Namespace) -> list[dict[str, Run]]:
    """Blocks of all arms; the first one warms everything up and fills the places."""
    blocks = []
    for index in range(options.repeats + 1):
        prompt = some_prompt(options.prompt_tokens, engine.target.vocab_size, index)
        cold = run(engine, prompt)
        blocks.append({"cold": cold, "hit": run(engine, prompt), "copy": copied(engine, prompt)})
    return blocks[1:]


def figures(blocks: Sequence[dict[str, Run]]) -> dict[str, object]:
    """Medians per arm, and how many times faster than cold (paired, 95%)."""
    found: dict[str, object] = {}
    for arm in ARMS:
        runs = [block[arm] for block in blocks]
        arm_figures: dict[str, object] = {
            "first_s": statistics.median(run.first_s for run in runs),
            "first_drafted_s": statistics.median(run.first_drafted_s for run in runs),
            "num_cached": sorted({run.num_cached for run in runs}),
            "same_text_as_cold": sum(
                block[arm].token_ids == block["cold"].token_ids for block in blocks
            ),
        }
        for key in ("first_s", "first_drafted_s"):
            cold = [getattr(block["cold"], key) for block in blocks]
            ratio = bootstrap_ratio(cold, [getattr(run, key) for run in runs], seed=0)
            arm_figures[f"speedup_{key}"] = [ratio.estimate, ratio.low, ratio.high]
        found[arm] = arm_figures
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="zoo:code-11m")
    parser.add_argument("--draft", default="zoo:code-2m")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None, help="write JSON here too")
    options = parser.parse_args()
    config = EngineConfig(
        controller="fixed",
        num_speculative_tokens=options.k,
        max_batch=2,
        max_context=options.prompt_tokens + 24,
        num_threads=options.threads,
    )
    engine = Engine.load(options.target, options.draft, config=config)
    blocks = measure(engine, options)
    names = (options.target, options.draft)
    content = {
        "arguments": sys.argv[1:],
        "runner": type(engine.target).__name__,
        "num_blocks": len(blocks),
        **figures(blocks),
        "provenance": collect({name: content_hash(name) for name in names}).to_dict(),
    }
    text = json.dumps(content, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
