"""How many requests per second `forerun simulate` gets through, by controller and mode.

`python benchmarks/simulate/run.py --out result.json`. Every figure is the median of several runs in
one process, over the whole of a run: requests drawn, texts drawn, served, summed up. Seconds are
the processor's for this one thread, so that waiting for it does not count.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

from forerun.measure.profile.profile import load_profile
from forerun.plan.costs import DraftCosts
from forerun.plan.simulation.comparison import ControllerComparison
from forerun.plan.simulation.config import Workload
from forerun.plan.simulation.workload_file import load_workload
from forerun.provenance import collect

HERE = Path(__file__).parent
PROFILE = HERE.parent / "profiles" / "shipped-pair.json"
FINE = (("plain", 3), ("fixed:4", 5), ("goodput", 1), ("auto", 1))
"""Controllers and how often each is run."""
MILLION = 1_000_000


def rates(count: int, times: int, run: Callable[[], object]) -> dict[str, object]:
    """Requests per second."""
    found = []
    for _ in range(times):
        started_s = time.process_time()
        run()
        found.append(count / (time.process_time() - started_s))
    return {"requests": count, "requests_per_s": median(found), "samples": found}


def measured(workload: Workload, costs: DraftCosts, million: int) -> dict[str, object]:
    """Every controller in the fine mode, fixed K in the coarse one."""
    found: dict[str, object] = {}
    for name, times in FINE:
        found[name] = rates(
            workload.requests,
            times,
            lambda name=name: ControllerComparison(workload, costs, seed=1).run(name),
        )
    many = replace(workload, requests=million)
    for name in ("plain", "fixed:4"):
        found[f"coarse {name}"] = rates(
            million,
            1,
            lambda name=name: ControllerComparison(many, costs, seed=1, coarse=True).run(name),
        )
    return found


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--million", type=int, default=MILLION, help="requests in the coarse mode")
    arguments = parser.parse_args()
    workload = load_workload(HERE / "workload.yaml")
    found = measured(workload, load_profile(PROFILE).costs, arguments.million)
    for name, rate in found.items():
        print(f"{name:<16} {rate['requests_per_s']:,.0f} requests/s")  # type: ignore[index]
    content = {"rates": found, "provenance": collect({}).to_dict()}
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
