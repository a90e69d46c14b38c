"""`forerun simulate`: controllers on a workload that nobody has to run."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from forerun.cli.command import Command
from forerun.cli.paths import check_picture
from forerun.errors import InvalidRequest, InvalidTrace

if TYPE_CHECKING:
    from forerun.plan.costs import DraftCosts
    from forerun.plan.simulation.config import Workload
    from forerun.plan.simulation.regret import Oracle
    from forerun.plan.simulation.result import Result
    from forerun.probe.profile import Profile

__all__ = ["COMMAND", "SimulateOptions"]

logger = logging.getLogger(__name__)

ORACLE_KS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12)
"""Fixed K the oracle chooses from, as far as the workload's max_k goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of `forerun simulate`."""

    workload: Path
    """YAML: requests, arrivals, lengths, acceptance by phase, server; see docs/simulation.md."""
    profile: Path
    """What `forerun profile` wrote: what cycles take."""
    correct_by: Path | None = None
    """Correct the profile by what the cycles of this trace took.
    It must be of the same target, on the machine that is to serve."""
    controllers: tuple[str, ...] = ("plain", "fixed:4", "goodput")
    """Any of plain, fixed:K, auto, heuristic, confidence, goodput, bandit."""
    overlap: Literal["none", "early", "pearl"] = "none"
    """Draft and verify side by side on two devices.
    "pearl" drafts on while the last tokens are verified.
    "early" verifies the first token while the others are drafted."""
    no_oracle: bool = False
    """Do not look for the best fixed K of every phase, which takes a run per K."""
    coarse: bool = False
    """Take every step between arrivals and ends for an average one.
    For millions of requests; plain and fixed:K only."""
    seed: int = 0
    """Of arrivals, lengths and texts; the same seed gives the same figures."""
    plot: Path | None = None
    """Draw latency and K by phase into this .png, .svg or .pdf file."""
    json: bool = False
    """Print one JSON object."""


def run(options: SimulateOptions) -> int:
    """Simulate every controller and show."""
    if options.plot is not None:
        check_picture("--plot", options.plot)
    if not options.controllers:
        raise InvalidRequest("name the --controllers to simulate")

    from forerun.cli.simulate_tables import print_simulation
    from forerun.plan.simulation.workload_file import load_workload
    from forerun.probe.profile_file import load_profile

    workload = load_workload(options.workload)
    profile = load_profile(options.profile)
    costs = profile.costs
    if options.correct_by is not None:
        costs = as_traced(costs, profile, options.correct_by, workload.temperature)
    results, oracle = simulated(options, workload, costs)
    if options.json:
        print(json.dumps(content(options, workload, results, oracle)))
    else:
        print_simulation(results, oracle, workload)
    if options.plot is not None:
        from forerun.plan.simulation.plot import plot

        plot(results, oracle, options.plot)
    return 0


def as_traced(costs: DraftCosts, profile: Profile, path: Path, temperature: float) -> DraftCosts:
    """The costs as a trace has them; says on stderr by how much they differ.

    Raises:
        InvalidTrace: it cannot be read, is of another pair, or has nothing to compare.
    """
    from forerun.plan.simulation.correction import corrected, correction_of
    from forerun.theory.record import TraceHeader
    from forerun.trace.files import read_trace

    items = list(read_trace(path))
    for item in items:
        if isinstance(item, TraceHeader):
            mine, its = profile.setup.target_hash, item.target_hash
            if its != mine:
                raise InvalidTrace(
                    f"the trace {path} is of target_hash {its} ({item.target}), the profile of "
                    f"{mine} ({profile.target}): steps of one say nothing of the other"
                )
    correction = correction_of(items, costs, temperature, str(path))
    logger.warning(
        "corrected by %s: plain steps x%.2f, cycles x%.2f, reading x%.2f",
        path,
        correction.plain,
        correction.cycle,
        correction.reading,
    )
    return corrected(costs, correction)


def simulated(
    options: SimulateOptions, workload: Workload, costs: DraftCosts
) -> tuple[list[Result], Oracle | None]:
    """Every controller, and the oracle where it is wanted."""
    from forerun.plan.simulation.comparison import ControllerComparison

    comparison = ControllerComparison(
        workload, costs, seed=options.seed, overlap=options.overlap, coarse=options.coarse
    )
    comparison.check(options.controllers)
    results = [comparison.run(name) for name in options.controllers]
    if options.no_oracle:
        return results, None
    ks = [k for k in ORACLE_KS if k <= workload.server.max_k]
    return results, comparison.oracle(ks)


def content(
    options: SimulateOptions, workload: Workload, results: Sequence[Result], oracle: Oracle | None
) -> dict[str, object]:
    """As JSON wants it."""
    return {
        "workload": asdict(workload),
        "profile": str(options.profile),
        "overlap": options.overlap,
        "coarse": options.coarse,
        "seed": options.seed,
        "results": [
            result.to_dict()
            | (
                {}
                if oracle is None
                else {
                    "regret": oracle.regret(result),
                    "phase_regrets": oracle.phase_regrets(result),
                }
            )
            for result in results
        ],
        "oracle": None if oracle is None else asdict(oracle),
    }


COMMAND = Command(
    options=SimulateOptions,
    run=run,
    description="Serve a workload in simulated time under several controllers, the engine's own,\n"
    "and compare latency, throughput and what each lost against the best fixed K.",
    examples=(
        "forerun simulate --workload w.yaml --profile profile.json",
        "forerun simulate --workload w.yaml --profile profile.json --controllers plain fixed:3 "
        "auto bandit --plot s.svg",
        "forerun simulate --workload w.yaml --profile profile.json --correct-by trace.jsonl",
        "forerun simulate --workload w.yaml --profile profile.json --controllers fixed:4 --overlap "
        "pearl --no-oracle",
        "forerun simulate --workload million.yaml --profile profile.json --controllers fixed:4 "
        "--coarse --json | jq '.results[0].tpot_s'",
    ),
)
