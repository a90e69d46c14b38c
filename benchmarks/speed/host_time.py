"""Microseconds of a cycle by part: the calls of the kernels, and every part of the step in Python.

python benchmarks/speed/host_time.py
python benchmarks/speed/host_time.py --target zoo:code-40m --draft zoo:code-2m-for-40m --tokens 96

K is fixed, one thread. "outside" is the time of the engine's steps less that of the calls that
compute cycles: all that is Python. Beside a large target it finds cold caches and takes longer.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

from forerun import Engine, EngineConfig, SamplingParams
from forerun.models.base import ModelCycle
from forerun.provenance import collect

CASES = ((0, 0.0, 1), (4, 0.0, 1), (4, 1.0, 1), (4, 1.0, 8))
"""K, temperature and batch."""
NUM_ROUNDS = 15
PARTS = ("draft", "target", "verify", "schedule", "plan", "take", "rows", "commit", "rest")
"""Of the calls: drafting, target pass, verification; of Python: what the methods below take."""


def watched(engine: Engine, spent_s: defaultdict[str, float]) -> None:
    """Add up the seconds of the parts of a step, each without the parts inside it.

    The functions put around the methods count as Python, too.
    """
    stepper = engine.stepper
    inner_s = [0.0]

    def watch(owner: Any, name: str, part: str) -> None:
        method: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            before_s, inner_s[0] = inner_s[0], 0.0
            begun_s = time.perf_counter()
            found = method(*args, **named)
            took_s = time.perf_counter() - begun_s
            spent_s[part] += took_s - inner_s[0]
            inner_s[0] = before_s + took_s
            return found

        setattr(owner, name, timed)

    run_cycles = engine.target.run_cycles

    def timed_cycles(*args: Any) -> list[ModelCycle]:
        cycles = run_cycles(*args)
        for cycle in cycles:
            spent_s["draft"] += cycle.draft_s
            spent_s["target"] += cycle.verify_s
            spent_s["verify"] += cycle.other_s
        call_s = sum(c.draft_s + c.verify_s + c.other_s for c in cycles)
        inner_s[0] += call_s
        spent_s["calls"] += call_s
        return cycles

    engine.target.run_cycles = timed_cycles  # type: ignore[method-assign]
    watch(stepper.scheduler, "schedule", "schedule")
    watch(stepper.scheduler, "assign_rows", "rows")
    watch(stepper, "_plan", "plan")
    watch(stepper, "_run_cycles", "take")
    watch(stepper, "_commit", "commit")


def measured(options: argparse.Namespace, k: int, temperature: float, batch: int) -> dict[str, Any]:
    config = EngineConfig(
        controller="fixed",
        num_speculative_tokens=max(k, 1),
        max_batch=batch,
        num_threads=1,
        sharing="none",
    )
    engine = Engine.load(options.target, draft=options.draft if k else None, config=config)
    spent_s: defaultdict[str, float] = defaultdict(float)
    watched(engine, spent_s)
    found: dict[str, list[float]] = {name: [] for name in (*PARTS, "outside")}
    for _ in range(NUM_ROUNDS + 1):
        for seed in range(batch):
            params = SamplingParams(
                temperature=temperature, max_tokens=options.tokens, ignore_eos=True, seed=seed
            )
            engine.add_request(list(range(5, 37)), params, f"r{seed}")
        engine.step()
        engine.step()
        spent_s.clear()
        num_before, began_s = engine.stepper.cycle_id, time.perf_counter()
        while engine.has_unfinished:
            engine.step()
        total_s = time.perf_counter() - began_s
        num_cycles = engine.stepper.cycle_id - num_before
        spent_s["outside"] = total_s - spent_s["calls"]
        spent_s["rest"] = spent_s["outside"] - sum(spent_s[part] for part in PARTS[3:-1])
        for name, values in found.items():
            values.append(1e6 * spent_s[name] / num_cycles)
        for seed in range(batch):
            engine.take_output(f"r{seed}")
    return {name: values[1:] for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="zoo:code-2m")
    parser.add_argument("--draft", default="zoo:code-2m")
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    made = collect({}).to_dict()
    print(made["commit"], made["cpu"], made["packages"]["torch"], options.target, options.draft)
    for k, temperature, batch in CASES:
        found = measured(options, k, temperature, batch)
        outside = found["outside"]
        parts = ", ".join(f"{name} {median(found[name]):.0f}" for name in PARTS)
        print(
            f"K={k}, T={temperature:g}, batch {batch}: outside {median(outside):.0f} "
            f"({min(outside):.0f} to {max(outside):.0f}) us; {parts}"
        )


if __name__ == "__main__":
    main()
