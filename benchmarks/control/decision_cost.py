"""What a decision costs: microseconds per request and step, deciding and observing apart.

    python benchmarks/control/decision_cost.py [--json FILE]

Steps are made up (acceptance by request, times by a table), so that nothing but the controllers is
on the clock. Every figure is the median over blocks of steps, after a warm-up. The caches are warm,
and no drafter makes trees; so the last lines are of an engine, whose passes of the target leave
cold caches: zoo:code-40m with zoo:code-2m-for-40m at T=1 and batch 1, the mean over all steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from forerun import Engine, EngineConfig, SamplingParams
from forerun.control.base import Capacity, Controller, DecisionReuse, Plan, RequestState
from forerun.control.config import GoodputConfig
from forerun.control.goodput import GoodputController
from forerun.control.named import FixedController
from forerun.models.catalog import held_out_prompts
from forerun.provenance import collect
from forerun.theory.cost import CostLine, CostTable
from forerun.theory.record import StepRecord
from forerun.theory.splitmix import INCREMENT, finalise

BATCHES = (1, 4, 16, 64)
MAX_K = 8
WARM_UP, BLOCKS, STEPS = 60, 15, 20
CAPACITY = Capacity(max_rows=4096)
ROWS = (1, 2, 3, 5, 9)
PLAIN_S = 0.01


class Costs:
    """A draft of a tenth of the target, rows that cost a fiftieth of a step each."""

    def at(self, temperature: float) -> CostTable:
        """The same at every temperature."""
        return CostTable(
            lines=tuple(
                CostLine(
                    batch=batch,
                    context=context,
                    rows=ROWS,
                    verify_s=tuple(PLAIN_S * (1 + 0.004 * batch * (n - 1)) for n in ROWS),
                    plain_s=PLAIN_S,
                    draft_s=0.05 * PLAIN_S,
                    overhead_s=(0.03 * PLAIN_S,),
                )
                for batch in BATCHES
                for context in (0, 4096)
            )
        )


def controllers() -> dict[str, Callable[[], Controller]]:
    """What is measured, by name."""
    costs = {"draft_model": Costs()}
    two = {"draft_model": Costs(), "suffix": Costs()}

    def named(name: str) -> Controller:
        return FixedController(MAX_K) if name == "fixed" else GoodputController(costs, MAX_K)

    return {
        "fixed": lambda: named("fixed"),
        "auto": lambda: named("auto"),
        "auto, every step": lambda: GoodputController(costs, MAX_K, GoodputConfig(reuse=1)),
        "auto, two drafters": lambda: GoodputController(two, MAX_K),
    }


class Draws:
    """Numbers in [0, 1) by counting."""

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> float:
        """One more."""
        self.count += 1
        return finalise(self.count * INCREMENT) / 2.0**64


def alpha_of(index: int) -> float:
    """Requests differ, as they do."""
    return (0.3, 0.5, 0.7, 0.9)[index % 4]


def states_of(lengths: list[int]) -> list[RequestState]:
    """What the engine would say of the requests."""
    return [
        RequestState(
            request_id=f"r{index}",
            num_committed=length,
            max_new=1000,
            temperature=1.0,
        )
        for index, length in enumerate(lengths)
    ]


def outcome(plan: Plan, index: int, cycle: int, draws: Draws, step_s: float) -> StepRecord:
    """What became of one request."""
    k, accepted = plan.num_speculative_tokens, 0
    while accepted < k and draws.next() < alpha_of(index):
        accepted += 1
    return StepRecord(
        cycle_id=cycle,
        t_s=0.0,
        request_id=f"r{index}",
        step=cycle,
        method=plan.method,
        k_budget=k,
        num_drafted=k,
        depth_drafted=k,
        num_accepted=accepted,
        num_emitted=accepted + 1,
        draft_s=0.05 * PLAIN_S * k,
        verify_s=step_s,
        other_s=0.0,
        batch_rows=k + 1,
        num_prefill_rows=0,
        context_tokens=100,
        last_token_source="recovered",
        expected_accepted=0.0,
    )


def measure(make: Callable[[], Controller], batch: int) -> tuple[float, float]:
    """Microseconds per request and step of deciding and of observing."""
    controller, draws = make(), Draws()
    reuse: DecisionReuse[int] = DecisionReuse(controller, CAPACITY)
    lengths = [100] * batch
    decided: list[float] = []
    observed: list[float] = []
    for cycle in range(WARM_UP + BLOCKS * STEPS):
        states = states_of(lengths)
        start_s = time.perf_counter()
        plans = reuse.plan(range(batch), states.__getitem__, is_whole=True)
        decided.append(time.perf_counter() - start_s)
        step_s = PLAIN_S * (0.95 + 0.1 * draws.next())
        records = [outcome(p, at, cycle, draws, step_s) for at, p in enumerate(plans)]
        for index, record in enumerate(records):
            lengths[index] += record.num_emitted
        start_s = time.perf_counter()
        controller.observe(records)
        observed.append(time.perf_counter() - start_s)
    return per_request(decided, batch), per_request(observed, batch)


def per_request(seconds: list[float], batch: int) -> float:
    """Median over blocks of the mean of a block, so that rare work counts with its share."""
    kept = seconds[WARM_UP:]
    blocks = [statistics.fmean(kept[at : at + STEPS]) for at in range(0, len(kept), STEPS)]
    return 1e6 * statistics.median(blocks) / batch


def measure_on_engine() -> tuple[float, float]:
    """Microseconds per step of deciding and observing in an engine, from its first step on."""
    took_s: defaultdict[str, float] = defaultdict(float)

    def timed(name: str) -> Any:
        call = getattr(GoodputController, name)

        def run(*inputs: Any) -> Any:
            start_s = time.perf_counter()
            result = call(*inputs)
            took_s[name] += time.perf_counter() - start_s
            return result

        return patch.object(GoodputController, name, run)

    config = EngineConfig(num_threads=2)
    engine = Engine.load("zoo:code-40m", draft="zoo:code-2m-for-40m", config=config)
    prompts = [prompt.text for prompt in held_out_prompts()[:4]]
    with timed("decide"), timed("observe"):
        for prompt in prompts:
            engine.generate([prompt], SamplingParams(temperature=1.0, max_tokens=256))
    num_steps = sum(choice.num_steps for choice in engine.choices())
    return 1e6 * took_s["decide"] / num_steps, 1e6 * took_s["observe"] / num_steps


def main() -> None:
    """Measure all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    found: list[dict[str, object]] = []
    print(f"{'controller':26}{'batch':>6}{'decide':>9}{'observe':>9}  us per request and step")
    for name, make in controllers().items():
        for batch in BATCHES:
            decide_us, observe_us = measure(make, batch)
            print(f"{name:26}{batch:6}{decide_us:9.1f}{observe_us:9.1f}")
            found.append(
                {
                    "controller": name,
                    "batch": batch,
                    "max_k": MAX_K,
                    "decide_us": round(decide_us, 2),
                    "observe_us": round(observe_us, 2),
                }
            )
    decide_us, observe_us = measure_on_engine()
    print(f"{'auto, on an engine':26}{1:6}{decide_us:9.1f}{observe_us:9.1f}")
    found.append(
        {
            "controller": "auto, on an engine",
            "batch": 1,
            "max_k": MAX_K,
            "decide_us": round(decide_us, 2),
            "observe_us": round(observe_us, 2),
        }
    )
    if options.json is not None:
        content = {"provenance": collect({}).to_dict(), "decision_cost": found}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
