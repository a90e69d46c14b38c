"""A simulation for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from forerun.cli.tables import table_of
from forerun.plan.simulation.config import Workload
from forerun.plan.simulation.regret import Oracle
from forerun.plan.simulation.result import PhaseResult, Quantiles, Result

__all__ = ["print_simulation"]

SATURATED = 0.98
"""Share of the time in cycles from which on a queue is taken to grow."""

LEGEND = (
    "TTFT: to the first token, waiting included; TPOT: per token after it; p50 and p99 over\n"
    "requests; in SLO: requests that got what was promised; regret: decoding time of all\n"
    "requests against the best fixed K of every phase, known beforehand"
)


def print_simulation(results: Sequence[Result], oracle: Oracle | None, workload: Workload) -> None:
    """One line per controller, then one table of phases, then what the figures mean."""
    console = Console(highlight=False)
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
    """Throughput, latency, promises, regret."""
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
    """Milliseconds per token and drafted tokens per step, by phase."""
    headings = []
    for number, phase in enumerate(workload.phases):
        best = "" if oracle is None else f"\nbest K {oracle.ks[number]}"
        headings.append(escape(phase.name or f"phase {number + 1}") + best)
    table = table_of(Column("ms per token, mean K", no_wrap=True), *headings)
    for result in results:
        table.add_row(escape(result.controller), *map(phase_cell, result.phases))
    return table


def phase_cell(found: PhaseResult) -> str:
    """One controller in one phase."""
    if not found.num_tokens:
        return "nothing decoded"
    return f"{1e3 * found.decode_s / found.num_tokens:.3g}, {found.mean_k:.1f}"


def remarks(results: Sequence[Result]) -> list[str]:
    """Where figures depend on how long the workload is."""
    full = [result.controller for result in results if result.busy_share > SATURATED]
    if not full:
        return []
    return [
        f"no idle time with {', '.join(full)}: requests come at least as fast as they are served, "
        "so how long they wait depends on how many there are"
    ]


def both(found: Quantiles) -> str:
    """Median and 99th percentile for people, in the unit the larger one asks for."""
    unit, factor = ("s", 1.0) if found.p99 >= 1.0 else ("ms", 1e3)
    return f"{factor * found.p50:.3g} / {factor * found.p99:.3g} {unit}"
