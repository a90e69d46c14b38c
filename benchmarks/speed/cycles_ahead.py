"""Times steps with cycles computed ahead against single steps, on the shipped pair.

python benchmarks/speed/cycles_ahead.py --rounds 10 --temperature 0 --batch 1
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.provenance import collect
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import median_interval

PROMPT = 'def quicksort(items):\n    """Sort a list."""\n'
NUM_TOKENS = 200


def config_of(cycles_per_call: int) -> EngineConfig:
    return EngineConfig(
        num_speculative_tokens=4,
        controller="fixed",
        max_batch=8,
        max_context=1024,
        cycles_per_call=cycles_per_call,
    )


def over(engine: Engine, cycles_per_call: int, *, drafts: bool) -> Engine:
    return Engine(
        target=engine.target,
        tokenizer=engine.tokenizer,
        drafter=engine.drafter if drafts else None,
        config=config_of(cycles_per_call),
        eos_token_ids=engine.eos_token_ids,
    )


def timed(engine: Engine, ids: list[list[int]], params: list[SamplingParams]) -> tuple:
    num_before, began_s = engine.stepper.cycle_id, time.perf_counter()
    outputs = engine.generate(ids, params)
    spent_s = time.perf_counter() - began_s
    num_steps = engine.stepper.cycle_id - num_before
    return spent_s / num_steps, [output.token_ids for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    base = Engine.load("zoo:code-40m", draft="zoo:code-2m-for-40m", config=config_of(8))
    ids = [base.tokenizer.encode(PROMPT)] * options.batch
    params = [
        SamplingParams(
            temperature=options.temperature, max_tokens=NUM_TOKENS, ignore_eos=True, seed=7 + place
        )
        for place in range(options.batch)
    ]
    for name, drafts in (("plain", False), ("K=4", True)):
        single, ahead = (over(base, n, drafts=drafts) for n in (1, 8))
        assert timed(single, ids, params)[1] == timed(ahead, ids, params)[1]  # and a warm-up
        pairs = []
        for index in range(options.rounds):
            first, second = (single, ahead) if index % 2 == 0 else (ahead, single)
            one, other = timed(first, ids, params)[0], timed(second, ids, params)[0]
            pairs.append((one, other) if index % 2 == 0 else (other, one))
        ratio = median_interval([before / after for before, after in pairs])
        row = {
            "arm": name,
            "temperature": options.temperature,
            "batch": options.batch,
            "rounds": options.rounds,
            "single_ms": round(1e3 * median(before for before, _ in pairs), 3),
            "ahead_ms": round(1e3 * median(after for _, after in pairs), 3),
            "single_over_ahead": [round(v, 3) for v in (ratio.estimate, ratio.low, ratio.high)],
        }
        print(json.dumps(row), flush=True)
    print(collect({"target": "zoo:code-40m", "draft": "zoo:code-2m-for-40m"}).line)


if __name__ == "__main__":
    main()
