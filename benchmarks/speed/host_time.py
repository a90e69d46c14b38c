"""Microseconds of a cycle outside the calls of the kernels, where the passes themselves are short.

python benchmarks/speed/host_time.py

Target and draft are zoo:code-2m, K is fixed, one thread. The time of the calls that compute cycles
is subtracted from that of the engine's steps; what is left is Python.
"""

from __future__ import annotations

import time
from statistics import median

from forerun import Engine, EngineConfig, SamplingParams
from forerun.provenance import collect

CASES = ((0, 0.0, 1), (4, 0.0, 1), (4, 1.0, 1), (4, 1.0, 8))
"""K, temperature and batch."""
NUM_TOKENS, NUM_ROUNDS = 200, 15


def measured(k: int, temperature: float, batch: int) -> list[float]:
    config = EngineConfig(
        controller="fixed",
        num_speculative_tokens=max(k, 1),
        max_batch=batch,
        num_threads=1,
        sharing="none",
    )
    engine = Engine.load("zoo:code-2m", draft="zoo:code-2m" if k else None, config=config)
    runner = engine.stepper.cycles
    assert runner is not None
    compute, inside_s = runner._compute, 0.0

    def timed(*asked: object) -> bool:
        nonlocal inside_s
        found = compute(*asked)
        inside_s += runner._call_s
        return found

    runner._compute = timed
    found = []
    for _ in range(NUM_ROUNDS + 1):
        for seed in range(batch):
            params = SamplingParams(
                temperature=temperature, max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed
            )
            engine.add_request(list(range(5, 37)), params, f"r{seed}")
        engine.step()
        engine.step()
        inside_s, num_before, began_s = 0.0, engine.stepper.cycle_id, time.perf_counter()
        while engine.has_unfinished:
            engine.step()
        spent_s = time.perf_counter() - began_s - inside_s
        found.append(1e6 * spent_s / (engine.stepper.cycle_id - num_before))
        for seed in range(batch):
            engine.take_output(f"r{seed}")
    return found[1:]


def main() -> None:
    made = collect({}).to_dict()
    print(made["commit"], made["cpu"], made["packages"]["torch"])
    for k, temperature, batch in CASES:
        values = measured(k, temperature, batch)
        print(
            f"K={k}, T={temperature:g}, batch {batch}: median {median(values):.0f}, "
            f"least {min(values):.0f}, most {max(values):.0f} us"
        )


if __name__ == "__main__":
    main()
