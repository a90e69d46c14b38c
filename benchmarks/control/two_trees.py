"""`auto` of two source trees and fixed K=4 over plain decoding, without a profile, in turns.

    git worktree add /tmp/before c337163
    python benchmarks/control/two_trees.py --before /tmp/before --rounds 18 --out two-trees.json

Every arm is a process, which waits while another is measured, and serves one request of 128 tokens
per round; what `auto` has learnt stays from request to request. Ratios are geometric means over
rounds with bootstrap intervals (95%), prefill included.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from paused import PausedProcess, mean_ratio

HERE = Path(__file__).resolve().parents[2]
TARGET = "zoo:code-40m"
DRAFTS = {"shipped draft": "zoo:code-2m-for-40m", "useless draft": "zoo:books-1m"}


def worker(job: dict[str, Any]) -> None:
    """Serve the requests that standard input names and print tokens per second."""
    from forerun import Engine, EngineConfig, SamplingParams
    from forerun.models.catalog import held_out_prompts

    config = EngineConfig(
        num_threads=2, sharing="none", num_speculative_tokens=4, controller=job["controller"]
    )
    engine = Engine.load(TARGET, draft=job["draft"], config=config)
    texts = [prompt.text for prompt in held_out_prompts()]
    print("ready", flush=True)
    for line in sys.stdin:
        temperature, number = json.loads(line)
        params = SamplingParams(temperature=temperature, max_tokens=128, ignore_eos=True)
        started = time.perf_counter()
        (output,) = engine.generate([texts[number * 3 % len(texts)]], params)
        seconds = time.perf_counter() - started
        print(json.dumps(len(output.token_ids) / seconds), flush=True)


def process(tree: Path, controller: str, draft: str | None) -> PausedProcess:
    """The process of one arm."""
    return PausedProcess(__file__, tree, {"controller": controller, "draft": draft})


def compare(before: Path, after: Path, draft: str, temperature: float, rounds: int) -> dict:
    """Rates of all arms, and their ratios to plain decoding with intervals."""
    arms = {
        "plain": process(after, "fixed", None),
        "fixed K=4": process(after, "fixed", draft),
        "auto before": process(before, "auto", draft),
        "auto after": process(after, "auto", draft),
    }
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds):
        names = list(arms)
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            rates[name].append(arms[name].tokens_per_s(temperature, number))
    for arm in arms.values():
        arm.process.kill()
    ratios = {name: mean_ratio(found, rates["plain"]) for name, found in rates.items()}
    return {"tokens_per_s": rates, "over_plain": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--before", type=Path)
    parser.add_argument("--after", type=Path, default=HERE)
    parser.add_argument("--rounds", type=int, default=18)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", type=json.loads)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.worker)
        return
    figures = {}
    for name, draft in DRAFTS.items():
        for temperature in (0.0, 1.0):
            found = compare(options.before, options.after, draft, temperature, options.rounds)
            figures[f"{name}, T={temperature:g}"] = found
            texts = [
                "{} {:.3f} ({:.3f} to {:.3f})".format(a, *r) for a, r in found["over_plain"].items()
            ]
            print(f"{name}, T={temperature:g}: {', '.join(texts[1:])}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
