"""What choosing K loses to knowing it: constant acceptance, and acceptance that falls suddenly.

    python benchmarks/control/simulated.py --profile FILE --out FILE

One request at a time, 128 output tokens each, in simulated time with the costs of a profile. Every
controller meets the same texts as every fixed K. The best fixed K of every phase is chosen with
hindsight, on the very texts it is scored on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from forerun.plan.costs import Costs
from forerun.plan.simulation.comparison import Comparison
from forerun.plan.simulation.config import Phase, ServerConfig, Workload
from forerun.plan.simulation.kinds.config import Constant, Fixed
from forerun.probe.profile_file import load_profile
from forerun.provenance import collect

ALPHAS = ((0.0,), (0.35,), (0.45,), (0.5,), (0.65,), (0.8,), (0.65, 0.35))
"""P(accepted) of every position, phase by phase."""
CONTROLLERS = ("goodput", "auto", "heuristic", "bandit")
MAX_K = 8
REQUESTS, TOKENS = 120, 128
SEEDS = range(2)


def workload_of(alphas: Sequence[float]) -> Workload:
    """Phases of equal length, the next beginning with a request."""
    return Workload(
        requests=REQUESTS,
        output_tokens=Fixed(tokens=TOKENS),
        phases=tuple(
            Phase(share=1.0 / len(alphas), acceptance=Constant(alpha=alpha)) for alpha in alphas
        ),
        server=ServerConfig(max_batch=1, max_k=MAX_K),
    )


def compared(alphas: Sequence[float], costs: Costs, seed: int) -> dict[str, object]:
    """Tokens per second of decoding over those of the best fixed K by phase, and over plain."""
    comparison = Comparison(workload_of(alphas), costs, seed=seed)
    oracle = comparison.oracle(range(MAX_K + 1))
    plain_s = comparison.run("plain").decode_s
    best_s = sum(oracle.decode_s)
    fixed_s = {k: comparison.run(f"fixed:{k}").decode_s for k in range(MAX_K + 1)}
    found: dict[str, object] = {
        "alphas": alphas,
        "seed": seed,
        "best_ks": oracle.ks,
        "best_over_plain": plain_s / best_s,
        "best_single_fixed": best_s / min(fixed_s.values()),
    }
    for name in CONTROLLERS:
        result = comparison.run(name)
        found[name] = {
            "of_best": best_s / result.decode_s,
            "over_plain": plain_s / result.decode_s,
            "of_best_by_phase": [1.0 / (1.0 + r) for r in oracle.phase_regrets(result)],
        }
    return found


def main() -> None:
    """Simulate, show, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    costs = load_profile(arguments.profile).costs
    rows = []
    for alphas in ALPHAS:
        for seed in SEEDS:
            row = compared(alphas, costs, seed)
            rows.append(row)
            print(json.dumps(row), flush=True)
    content = {"profile": arguments.profile.name, "rows": rows, "provenance": collect({}).to_dict()}
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
