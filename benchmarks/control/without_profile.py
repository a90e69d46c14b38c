"""`auto` without a profile beside plain decoding: drafts that pay and drafts that do not.

    python benchmarks/control/without_profile.py --out FILE

Requests of 256 tokens one at a time, arms in turns on the same prompts; a new engine per round, so
that `auto` begins without any costs or acceptance. Ratios are geometric means over rounds with
bootstrap intervals (95%), prefill included. Greedy text of these models loops, which flatters
drafts; the useless draft is trained on other text.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from paused import mean_ratio

from forerun import Engine, EngineConfig, SamplingParams
from forerun.models.catalog import held_out_prompts

CASES = {  # target, draft, temperature
    "code-40m, useless draft, T=0": ("zoo:code-40m", "zoo:books-1m", 0.0),
    "code-40m, useless draft, T=1": ("zoo:code-40m", "zoo:books-1m", 1.0),
    "code-40m, domain draft, T=0": ("zoo:code-40m", "zoo:code-2m-for-40m", 0.0),
    "code-11m, useless draft, T=0": ("zoo:code-11m", "zoo:books-1m", 0.0),
    "code-11m, useless draft, T=1": ("zoo:code-11m", "zoo:books-1m", 1.0),
    "code-11m, domain draft, T=0": ("zoo:code-11m", "zoo:code-2m", 0.0),
}


def seconds(engine: Engine, prompts: list[str], temperature: float) -> float:
    params = SamplingParams(temperature=temperature, max_tokens=256, ignore_eos=True)
    started = time.perf_counter()
    for prompt in prompts:
        engine.generate([prompt], params)
    return time.perf_counter() - started


def case(options: argparse.Namespace, name: str) -> dict[str, Any]:
    target, draft, temperature = CASES[name]
    config = EngineConfig(num_threads=2, sharing="none", num_speculative_tokens=4)
    plain = Engine.load(target, config=config)
    fixed = Engine.load(target, draft, config=replace(config, controller="fixed"))
    texts = [prompt.text for prompt in held_out_prompts()]
    rounds = []
    for number in range(options.rounds):
        prompts = texts[number * 2 % 50 :][:2]
        auto = plain.with_draft(draft)
        arms = {"plain": plain, "fixed": fixed, "auto": auto}
        if not number:
            for engine in arms.values():
                seconds(engine, prompts[:1], temperature)
            auto = arms["auto"] = plain.with_draft(draft)
        order = sorted(arms) if number % 2 else sorted(arms, reverse=True)
        rounds.append({arm: seconds(arms[arm], prompts, temperature) for arm in order})
    found: dict[str, Any] = {"rounds_s": rounds}
    for arm in ("fixed", "auto"):
        found[arm] = mean_ratio([r["plain"] for r in rounds], [r[arm] for r in rounds])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--cases", nargs="+", default=[*CASES])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    figures = {}
    for name in options.cases:
        found = figures[name] = case(options, name)
        texts = [
            "{} {:.3f} ({:.3f} to {:.3f})".format(arm, *found[arm]) for arm in ("fixed", "auto")
        ]
        print(f"{name}: of plain: {', '.join(texts)}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
