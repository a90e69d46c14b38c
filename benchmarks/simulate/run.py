"""How many requests per second `forerun plan --workload` gets through, by controller.

`python benchmarks/simulate/run.py --out result.json`. Every figure is the median of several runs in
one process, over the whole of a run: requests drawn, texts drawn, served, summed up. Seconds are
the processor's for this one thread, so that waiting for it does not count.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from forerun.measure.profile import load_profile
from forerun.plan.simulation import simulate
from forerun.plan.workload import Workload, load_workload
from forerun.provenance import collect
from forerun.theory.cost import DraftCosts

HERE = Path(__file__).parent
PROFILE = HERE.parent / "profiles" / "shipped-pair.json"
CONTROLLERS = (("plain", 3), ("fixed:4", 5), ("auto", 1))
"""Controllers and how often each is run."""


def rates(count: int, times: int, run: Callable[[], object]) -> dict[str, object]:
    """Requests per second."""
    found = []
    for _ in range(times):
        started_s = time.process_time()
        run()
        found.append(count / (time.process_time() - started_s))
    return {"requests": count, "requests_per_s": median(found), "samples": found}


def measured(workload: Workload, costs: DraftCosts) -> dict[str, object]:
    """Every controller."""
    return {
        name: rates(
            workload.requests,
            times,
            lambda name=name: simulate(workload, costs, name, seed=1),
        )
        for name, times in CONTROLLERS
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    workload = load_workload(HERE / "workload.toml")
    found = measured(workload, load_profile(PROFILE).costs)
    for name, rate in found.items():
        print(f"{name:<16} {rate['requests_per_s']:,.0f} requests/s")  # type: ignore[index]
    content = {"rates": found, "provenance": collect({}).to_dict()}
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
