"""What chains and trees are expected to gain from measured costs, in the simulator.

    python benchmarks/trees/simulate.py --out benchmarks/trees/results/expected.json

Every row is one profile and one probability that a draft's first child is accepted. The second
child is accepted in 0.4 of the cases in which the first is not. Nothing is timed: steps take what
the profile says, so the figures do not depend on the machine that this runs on.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from forerun.control.goodput import GoodputController
from forerun.measure.profile import load_profile
from forerun.plan.simulation import METHOD, Times, serve, simulate
from forerun.plan.workload import (
    Constant,
    Phase,
    SimulatedServerConfig,
    Uniform,
    Workload,
)
from forerun.theory.cost import DraftCosts

PROFILES = Path(__file__).parents[1] / "profiles"
CHAINS = ("plain", *(f"fixed:{k}" for k in (1, 2, 3, 4, 6, 8)))
TREES = tuple(
    f"tree:{shape}"
    for shape in ("3,2,4", "5,2,4", "7,2,4", "8,3,4", "8,4,4", "11,3,4", "12,4,4", "16,4,4")
)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    flags.add_argument("--profiles", nargs="+", default=["292m", "code-40m", "shipped-pair"])
    flags.add_argument(
        "--acceptance", nargs="+", type=float, default=[0.3, 0.5, 0.6, 0.7, 0.8, 0.9]
    )
    flags.add_argument("--seeds", type=int, default=2, help="streams of 8 requests per row")
    flags.add_argument("--out", type=Path, help="JSON file for the rows")
    options = flags.parse_args()
    logging.disable(logging.WARNING)  # that drafting was given up is one of the results
    cells = [(name, alpha) for name in options.profiles for alpha in options.acceptance]
    rows = [
        row_of(name, load_profile(PROFILES / f"{name}.json").costs, alpha, options.seeds)
        for name, alpha in track(cells, "simulating")
    ]
    Console().print(table_of(rows))
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def row_of(name: str, costs: DraftCosts, alpha: float, num_seeds: int) -> dict[str, object]:
    """Return the speed of the best shapes over plain decoding, and of `auto` over the best."""
    seconds: dict[str, float] = {}
    for seed in range(num_seeds):
        for arm, decode_s in run(costs, alpha, seed).items():
            seconds[arm] = seconds.get(arm, 0.0) + decode_s
    chain, tree = min(CHAINS, key=seconds.__getitem__), min(TREES, key=seconds.__getitem__)
    best_s = min(seconds[chain], seconds[tree])
    return {
        "profile": name,
        "acceptance": alpha,
        "best_chain": chain,
        "best_tree": tree,
        "chain_over_plain": seconds["plain"] / seconds[chain],
        "tree_over_plain": seconds["plain"] / seconds[tree],
        "auto_over_best": best_s / seconds["auto"],
        "auto_without_profile_over_best": best_s / seconds["auto, no profile"],
    }


def run(costs: DraftCosts, alpha: float, seed: int) -> dict[str, float]:
    """Return the seconds of decoding that one stream of requests takes with every arm."""
    workload = Workload(
        requests=8,
        prompt_tokens=64,
        output_tokens=Uniform(least=200, most=300),
        phases=(Phase(share=1.0, acceptance=Constant(alpha=alpha)),),
        server=SimulatedServerConfig(max_batch=1, max_k=8, max_tree_nodes=16),
        sibling_acceptance=0.4,
    )
    seconds = {
        arm: simulate(workload, costs, arm, seed=seed).decode_s for arm in (*CHAINS, *TREES, "auto")
    }
    blind = GoodputController({METHOD: None}, 8, tree_methods=(METHOD,), max_tree_nodes=16)
    found = serve(workload, Times(costs.greedy, costs.reading), blind, seed=seed)
    return {**seconds, "auto, no profile": found.decode_s}


def table_of(rows: list[dict[str, object]]) -> Table:
    """Return the rows as a table."""
    table = Table("profile", "acceptance", "best chain", "best tree", "tree / chain", "auto / best",
                  "auto / best, no profile")  # fmt: skip
    for row in rows:
        chain, tree = float(str(row["chain_over_plain"])), float(str(row["tree_over_plain"]))
        table.add_row(
            str(row["profile"]),
            str(row["acceptance"]),
            f"{chain:.2f} ({row['best_chain']})",
            f"{tree:.2f} ({row['best_tree']})",
            f"{tree / chain:.2f}",
            f"{row['auto_over_best']:.2f}",
            f"{row['auto_without_profile_over_best']:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
