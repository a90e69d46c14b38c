"""Controllers on a workload in simulated time, for `forerun plan --workload`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from rich.markup import escape
from rich.table import Column, Table
from tyro.conf import UseAppendAction, arg

from forerun.cli.tables import SafeConsole, status_text, table_of
from forerun.drafters.config import NONE
from forerun.errors import InvalidRequest

if TYPE_CHECKING:
    from forerun.measure.profile import Profile
    from forerun.plan.costs import DraftCosts
    from forerun.plan.simulation import Oracle, PhaseResult, Quantiles, Result
    from forerun.plan.workload import Workload

CONTROLLERS = ("plain", "fixed:4", "auto")
"""Simulated without --controller."""
ORACLE_KS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12)
"""Fixed K the oracle chooses from, as far as the workload's max_k goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationFlags:
    """A whole workload, served in simulated time by the engine's own controllers."""

    workload: Path | None = None
    """Simulate this TOML file in place of a plan: requests, arrivals, lengths, acceptance by phase,
    server; see docs/simulation.md."""
    controllers: Annotated[
        UseAppendAction[tuple[str, ...]], arg(name="controller", aliases=("--controllers",))
    ] = ()
    """Of a workload: any of plain, fixed:K, tree:NODES, auto. Default: plain fixed:4 auto."""
    no_oracle: bool = False
    """Do not look for the best fixed K of every phase, which takes a run per K."""
    seed: int = 0
    """Of arrivals, lengths and texts; the same seed gives the same figures."""


def simulate(
    flags: SimulationFlags, path: Path, profiles: Sequence[Profile], *, as_json: bool
) -> None:
    """Simulate the workload with the costs of every profile, and print the figures.

    Args:
        path: of the profiles.
    """
    from forerun.plan.workload import load_workload

    assert flags.workload is not None
    workload = load_workload(flags.workload)
    contents = {}
    for profile in profiles:
        own = without_drafts(flags, path) if profile.draft == NONE else flags
        with SafeConsole(stderr=True).status("simulating") as status:
            results, oracle = simulated(own, workload, profile.costs, status_text(status))
        if as_json:
            contents[profile.draft] = {
                "profile": str(path),
                "seed": flags.seed,
                **content(workload, results, oracle),
            }
            continue
        if len(profiles) > 1:
            print(f"{profile.draft}:")
        _print_simulation(results, oracle, workload)
    if as_json:
        [first, *others] = contents.values()
        print(json.dumps({"drafts": contents} if others else first))


def without_drafts(flags: SimulationFlags, path: Path) -> SimulationFlags:
    """Return the flags with plain decoding alone, which a profile without a draft has costs of.

    Raises InvalidRequest where another controller was named.
    """
    drafting = [name for name in flags.controllers if name not in ("plain", "fixed:0")]
    if drafting:
        raise InvalidRequest(
            f"{path} is a profile of plain decoding, which has no costs of drafts for "
            f"the controller {drafting[0]}; profile a draft"
        )
    return replace(flags, controllers=("plain",), no_oracle=True)


def simulated(
    flags: SimulationFlags, workload: Workload, costs: DraftCosts, report: Callable[[str], None]
) -> tuple[list[Result], Oracle | None]:
    """Simulate every controller, and the oracle unless it is left out."""
    from forerun.plan.simulation import ControllerComparison

    comparison = ControllerComparison(workload, costs, seed=flags.seed)
    controllers = flags.controllers or CONTROLLERS
    comparison.check(controllers)
    results = []
    for name in controllers:
        report(f"simulating {name}")
        results.append(comparison.run(name))
    if flags.no_oracle:
        return results, None
    report("looking for the best fixed K of every phase")
    ks = [k for k in ORACLE_KS if k <= workload.server.max_k]
    return results, comparison.oracle(ks)


def content(
    workload: Workload, results: Sequence[Result], oracle: Oracle | None
) -> dict[str, object]:
    return {
        "workload": msgspec.to_builtins(workload),
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


SATURATED = 0.98
"""Share of the time in cycles from which on a queue is taken to grow."""

LEGEND = (
    "TTFT: to the first token, waiting included; TPOT: per token after it; p50 and p99 over\n"
    "requests; in SLO: requests within their service level; regret: decoding time of all\n"
    "requests against the best fixed K of every phase, known beforehand"
)


def _print_simulation(results: Sequence[Result], oracle: Oracle | None, workload: Workload) -> None:
    """Print one line per controller, a table of phases, and remarks on the figures."""
    console = SafeConsole()
    first = results[0]
    console.print(
        f"[bold]{first.num_requests} requests, {first.num_tokens} tokens[/], "
        f"{len(workload.phases)} phase{'s' * (len(workload.phases) > 1)}",
        "",
        sep="\n",
    )
    console.print(controllers(results, oracle), "")
    if len(workload.phases) > 1 or oracle is not None:
        console.print(phases(results, oracle, workload), "")
    for remark in remarks(results):
        console.print(f"[yellow]{escape(remark)}[/]", soft_wrap=True)
    console.print(f"[dim]{LEGEND}[/]", soft_wrap=True)


def controllers(results: Sequence[Result], oracle: Oracle | None) -> Table:
    """Return the table of throughput, latency, service levels and regret."""
    table = table_of(
        Column("controller", no_wrap=True), "tokens/s", "batch", "TTFT\np50 / p99",
        "TPOT\np50 / p99", "in SLO", "regret",
    )  # fmt: skip
    for result in results:
        table.add_row(
            escape(result.controller),
            f"{result.tokens_per_s:.4g}",
            f"{result.mean_batch:.1f}",
            both(result.ttft_s),
            both(result.tpot_s),
            f"{result.num_in_slo / result.num_requests:.1%}",
            "" if oracle is None else f"{oracle.regret(result):+.1%}",
        )
    return table


def phases(results: Sequence[Result], oracle: Oracle | None, workload: Workload) -> Table:
    """Return the table of milliseconds per token and drafted tokens per step, by phase."""
    headings = []
    for number, phase in enumerate(workload.phases):
        best = "" if oracle is None else f"\nbest K {oracle.ks[number]}"
        headings.append(escape(phase.name or f"phase {number + 1}") + best)
    table = table_of(Column("ms per token, mean K", no_wrap=True), *headings)
    for result in results:
        table.add_row(escape(result.controller), *map(_phase_cell, result.phases))
    return table


def _phase_cell(found: PhaseResult) -> str:
    if not found.num_tokens:
        return "nothing decoded"
    return f"{1e3 * found.decode_s / found.num_tokens:.3g}, {found.mean_k:.1f}"


def remarks(results: Sequence[Result]) -> list[str]:
    full = [result.controller for result in results if result.busy_share > SATURATED]
    if not full:
        return []
    return [
        f"no idle time with {', '.join(full)}: requests come at least as fast as they are served, "
        "so how long they wait depends on how many there are"
    ]


def both(found: Quantiles) -> str:
    """Return median and 99th percentile as text, in ms if the latter is below 1 s."""
    unit, factor = ("s", 1.0) if found.p99 >= 1.0 else ("ms", 1e3)
    return f"{factor * found.p50:.3g} / {factor * found.p99:.3g} {unit}"
