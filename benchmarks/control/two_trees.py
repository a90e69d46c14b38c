"""`auto` of two source trees and fixed K=4 over plain decoding, without a profile, in turns.

    git worktree add /tmp/before c337163
    python benchmarks/control/two_trees.py --before /tmp/before --rounds 18 --out two-trees.json

Every arm is a process, which waits while another is measured, and serves one request of 128 tokens
per round; what `auto` has learnt stays from request to request. Ratios are geometric means over
rounds with bootstrap intervals (95%), prefill included. With `--context N` all prompts have N
tokens, and the time of a request counts from its first token, when the target has read the prompt.
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
    prompts = [engine.tokenizer.encode(prompt.text) for prompt in held_out_prompts()]
    if context := job["context"]:
        text = [token for ids in prompts for token in ids]
        prompts = [text[at : at + context] for at in range(0, len(text) - context, context)]
    print("ready", flush=True)
    for line in sys.stdin:
        temperature, number = json.loads(line)
        params = SamplingParams(
            temperature=temperature, max_tokens=job["num_tokens"], ignore_eos=True
        )
        started, num_tokens, skips_first = time.perf_counter(), 0, bool(job["context"])
        request_id = engine.add_request(prompts[number * 3 % len(prompts)], params)
        while engine.has_unfinished:
            new = sum(len(chunk.token_ids) for chunk in engine.step())
            if new and skips_first:
                started, skips_first = time.perf_counter(), False
            else:
                num_tokens += new
        seconds = time.perf_counter() - started
        engine.take_output(request_id)
        print(json.dumps(num_tokens / seconds), flush=True)


def compare(options: argparse.Namespace, draft: str, temperature: float) -> dict:
    """Rates of all arms, and their ratios to plain decoding with intervals."""
    arms = {
        name: PausedProcess(
            __file__,
            tree,
            {
                "controller": controller,
                "draft": None if name == "plain" else draft,
                "context": options.context,
                "num_tokens": options.tokens,
            },
        )
        for name, tree, controller in (
            ("plain", options.after, "fixed"),
            ("fixed K=4", options.after, "fixed"),
            ("auto before", options.before, "auto"),
            ("auto after", options.after, "auto"),
        )
    }
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(options.rounds):
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
    parser.add_argument("--context", type=int, default=0, help="tokens per prompt; 0: as they are")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, default=[*DRAFTS])
    parser.add_argument("--temperatures", type=float, nargs="+", default=(0.0, 1.0))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", type=json.loads)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.worker)
        return
    figures = {}
    for name in options.drafts:
        for temperature in options.temperatures:
            found = compare(options, DRAFTS[name], temperature)
            figures[f"{name}, T={temperature:g}"] = found
            texts = [
                "{} {:.3f} ({:.3f} to {:.3f})".format(a, *r) for a, r in found["over_plain"].items()
            ]
            print(f"{name}, T={temperature:g}: {', '.join(texts[1:])}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
