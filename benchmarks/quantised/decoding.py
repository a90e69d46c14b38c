"""Decoding speed with weights in fewer bits and with self-drafts, all arms in turns.

python -m benchmarks.quantised.decoding [--model FOLDER] [--rounds 12] [--temperature 0]

`--random 292m` makes a target with random weights of that shape: its speeds are of use, and the
acceptance of its self-drafts is not.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace

import torch
from benchmarks.pairs import SHAPES, random_target, train_tokenizer

from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.models.catalog import held_out_prompts
from forerun.sampling.config import SamplingParams

PLAIN = ("bf16", "int8", "int4")
SELF = ("self:int8", "self:int4-int8", "self:int4")
NUM_RESAMPLES = 2000


def ratio(times: list[float], base: list[float]) -> str:
    """Speed over that of the base, with a bootstrap interval over the rounds."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.empty(NUM_RESAMPLES, len(times), dtype=torch.int64)
    picks.random_(0, len(times), generator=generator)
    sums = torch.tensor([base, times])[:, picks].sum(-1)
    low, high = (sums[0] / sums[1]).quantile(torch.tensor([0.025, 0.975])).tolist()
    return f"{sum(base) / sum(times):.2f} ({low:.2f}-{high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="zoo:code-40m")
    parser.add_argument("--random", choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if options.random:
            random_target(SHAPES[options.random]).bfloat16().save_pretrained(scratch)
            train_tokenizer().save_pretrained(scratch)
            options.model = scratch
        measure(options)


def measure(options: argparse.Namespace) -> None:
    config = EngineConfig(
        max_batch=1, max_context=512, controller="fixed", num_speculative_tokens=4, num_threads=2
    )
    arms = {
        name: Engine.load(options.model, device="cpu", config=replace(config, weights=name))
        for name in PLAIN
    }
    for draft in SELF:
        arms[f"{draft}@4"] = arms["bf16"].with_draft(draft)
    prompts = [arms["bf16"].tokenizer.encode(p.text)[:64] for p in held_out_prompts()]
    params = SamplingParams(
        max_tokens=options.tokens, temperature=options.temperature, seed=1, ignore_eos=True
    )
    times: dict[str, list[float]] = {name: [] for name in arms}
    drafted, accepted = dict.fromkeys(arms, 0), dict.fromkeys(arms, 0)
    for turn in range(-1, options.rounds):
        names = [*arms][turn % len(arms) :] + [*arms][: turn % len(arms)]
        texts = {}
        for name in names:
            begin_s = time.perf_counter()
            (output,) = arms[name].generate([prompts[turn % len(prompts)]], params)
            taken_s = time.perf_counter() - begin_s
            texts[name] = output.token_ids
            if turn >= 0:  # the first round warms up
                times[name].append(taken_s)
                counts = output.completions[0].acceptance
                drafted[name] += counts.num_drafted
                accepted[name] += sum(n * number for (_, n), number in counts.steps.items())
        for name in texts:
            if name.startswith("self") and texts[name] != texts["bf16"]:
                raise SystemExit(f"{name} wrote another text in round {turn}")
    for name, taken in times.items():
        speed = len(taken) * options.tokens / sum(taken)
        share = f", accepted {accepted[name] / drafted[name]:.2f}" if drafted[name] else ""
        print(f"{name:16} {speed:7.1f} tokens/s  {ratio(taken, times['bf16'])}{share}", flush=True)


if __name__ == "__main__":
    main()
