"""Host time of a step with a tree beside that of a chain with as many nodes.

    python benchmarks/trees/host_time.py --out benchmarks/trees/results/host-time.json

The same greedy requests are decoded with chains and trees of 7 and 15 nodes in turns, one step per
call. Host time is the time of a step less drafting and the target's pass; the kernels choose the
nodes of greedy chains and trees within the calls that run the draft's passes. The builder is timed
alone, on the candidates of a vocabulary of 50,000 tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from forerun.control.base import Tree
from forerun.control.named import FixedController
from forerun.drafters.tree_growth import Candidates, build_tree
from forerun.drafters.tree_growth import Path as TreePath
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.observing import EmittedRecords
from forerun.models.catalog import held_out_prompts
from forerun.provenance import collect
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import bootstrap_ratio
from forerun.theory.record import StepRecord

SHAPES: dict[str, int | Tree] = {
    "chain of 7": 7,
    "tree of 7": Tree(num_nodes=7, depth=3, width=4),
    "chain of 15": 15,
    "tree of 15": Tree(num_nodes=15, depth=4, width=4),
}
BUILT = Tree(num_nodes=64, depth=8, width=8)
VOCAB = 50_000


def step_times(engine: Engine, prompt: str, num_tokens: int) -> list[float]:
    """Mean milliseconds of a step, of its host time, and of its drafting."""
    records: list[StepRecord] = []
    engine.observers[:] = [EmittedRecords(records.append)]
    ids = engine.tokenizer.encode(prompt)[:64]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    engine.generate([ids], params)
    decoding = [record for record in records if not record.num_prefill_rows]
    other_s, draft_s, verify_s = (
        fmean(getattr(record, name) for record in decoding)
        for name in ("other_s", "draft_s", "verify_s")
    )
    return [1e3 * seconds for seconds in (draft_s + verify_s + other_s, other_s, draft_s)]


def builder_us(num_runs: int = 300) -> float:
    """Median microseconds to build a tree from candidates that are looked up."""
    generator = torch.Generator().manual_seed(1)

    @cache
    def expand(path: TreePath) -> Candidates:
        probs = torch.softmax(3.0 * torch.empty(VOCAB).normal_(generator=generator), -1)
        values, tokens = probs.topk(BUILT.width)
        return tokens.tolist(), [math.log(value) for value in values.tolist()]

    times_s = []
    for _ in range(num_runs):
        start_s = time.perf_counter()
        build_tree(expand, BUILT)
        times_s.append(time.perf_counter() - start_s)
    return 1e6 * median(times_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="zoo:code-40m")
    parser.add_argument("--draft", default="zoo:code-2m-for-40m")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = EngineConfig(
        num_speculative_tokens=16,
        max_batch=1,
        max_context=512,
        sharing="none",
        num_threads=options.threads,
        controller="fixed",
        cycles_per_call=1,
    )
    loaded = Engine.load(options.target, options.draft, config=config)
    arms = {
        name: loaded.with_draft(loaded.drafter, controller=FixedController(shape))
        for name, shape in SHAPES.items()
    }
    found: dict[str, list[list[float]]] = {name: [] for name in arms}
    for number, prompt in enumerate(held_out_prompts()[: options.blocks + 1]):
        shift = number % len(arms)
        for name in [*arms][shift:] + [*arms][:shift]:
            times = step_times(arms[name], prompt.text, options.max_tokens)
            if number:  # the first one warms up
                found[name].append(times)
    content: dict[str, Any] = {
        "builder_us": builder_us(),
        "arms": {
            name: dict(
                zip(
                    ("step_ms", "host_ms", "draft_ms"),
                    map(fmean, zip(*times, strict=True)),
                    strict=True,
                )
            )
            for name, times in found.items()
        },
    }
    for nodes in (7, 15):
        chain, tree = found[f"chain of {nodes}"], found[f"tree of {nodes}"]
        for at, part in enumerate(("step", "host", "draft")):
            over = bootstrap_ratio([t[at] for t in tree], [c[at] for c in chain], seed=1)
            content[f"{part}, tree over chain of {nodes}"] = [over.estimate, over.low, over.high]
    content["provenance"] = collect({}, options.threads).to_dict()
    for name, figures in content.items():
        if name != "provenance":
            print(name, json.dumps(figures))
    if options.out is not None:
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
