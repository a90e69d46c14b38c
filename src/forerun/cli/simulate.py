"""Controllers on a workload in simulated time, for `forerun plan --workload`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from rich.markup import escape
from rich.table import Column
from tyro.conf import UseAppendAction, arg

from forerun.cli.tables import SafeConsole, status_text, table_of
from forerun.drafters.config import NONE
from forerun.errors import InvalidRequest

if TYPE_CHECKING:
    from forerun.measure.profile import Profile
    from forerun.plan.simulation import PhaseResult, Quantiles, Result
    from forerun.plan.workload import Workload

CONTROLLERS = ("plain", "fixed:4", "auto")
"""Simulated without --controller."""
SATURATED = 0.98
"""Share of the time in cycles from which on a queue is taken to grow."""
LEGEND = (
    "TTFT: to the first token, waiting included; TPOT: per token after it; p50 and p99 over\n"
    "requests; in SLO: requests within their service level; then by phase: milliseconds of\n"
    "decoding per token, and drafted tokens per step"
)


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
    seed: int = 0
    """Of arrivals, lengths and texts; the same seed gives the same figures."""


def simulate_profiles(
    flags: SimulationFlags, path: Path, profiles: Sequence[Profile], *, as_json: bool
) -> None:
    """Simulate the workload with the costs of every profile, and print the figures.

    Args:
        path: of the profiles.
    """
    from forerun.plan.simulation import controller_of, simulate
    from forerun.plan.workload import load_workload

    assert flags.workload is not None
    workload = load_workload(flags.workload)
    contents = {}
    for profile in profiles:
        names = _choose_names(flags, path, profile)
        for name in names:
            controller_of(name, workload, profile.costs)  # refuses a name before any run
        results = []
        with SafeConsole(stderr=True).status("simulating") as status:
            for name in names:
                status_text(status)(f"simulating {name}")
                results.append(simulate(workload, profile.costs, name, seed=flags.seed))
        contents[profile.draft] = {
            "profile": str(path),
            "seed": flags.seed,
            "workload": msgspec.to_builtins(workload),
            "results": [result.to_dict() for result in results],
        }
        if not as_json:
            _print_results(profile.draft, results, workload)
    if as_json:
        [first, *others] = contents.values()
        print(json.dumps({"drafts": contents} if others else first))


def _choose_names(flags: SimulationFlags, path: Path, profile: Profile) -> tuple[str, ...]:
    """Return the controllers; plain decoding alone with a profile that has no draft."""
    if profile.draft != NONE:
        return flags.controllers or CONTROLLERS
    drafting = [name for name in flags.controllers if name not in ("plain", "fixed:0")]
    if drafting:
        raise InvalidRequest(
            f"{path} is a profile of plain decoding, which has no costs of drafts for "
            f"the controller {drafting[0]}; profile a draft"
        )
    return ("plain",)


def _print_results(draft: str, results: Sequence[Result], workload: Workload) -> None:
    """Print one line per controller, and name those that leave no idle time."""
    console, first = SafeConsole(), results[0]
    title = f"{draft}: {first.num_requests} requests, {first.num_tokens} tokens"
    names = [phase.name or f"phase {n}" for n, phase in enumerate(workload.phases, start=1)]
    table = table_of(
        Column("controller", no_wrap=True), "tokens/s", "batch", "TTFT\np50 / p99",
        "TPOT\np50 / p99", "in SLO", *map(escape, names), title=title,
    )  # fmt: skip
    for result in results:
        table.add_row(
            escape(result.controller),
            f"{result.tokens_per_s:.4g}",
            f"{result.mean_batch:.1f}",
            _both(result.ttft_s),
            _both(result.tpot_s),
            f"{result.num_in_slo / result.num_requests:.1%}",
            *map(_phase_cell, result.phases),
        )
    console.print(table, "")
    if full := [result.controller for result in results if result.busy_share > SATURATED]:
        console.print(
            f"[yellow]no idle time with {escape(', '.join(full))}: requests come at least as fast "
            "as they are served, so how long they wait depends on how many there are[/]",
            soft_wrap=True,
        )
    console.print(f"[dim]{LEGEND}[/]", soft_wrap=True)


def _phase_cell(phase: PhaseResult) -> str:
    if not phase.num_tokens:
        return "nothing"
    mean_k = phase.num_drafted / phase.num_steps
    return f"{1e3 * phase.decode_s / phase.num_tokens:.3g}, K {mean_k:.1f}"


def _both(seconds: Quantiles) -> str:
    """Return median and 99th percentile as text, in ms if the latter is below 1 s."""
    unit, factor = ("s", 1.0) if seconds.p99 >= 1.0 else ("ms", 1e3)
    return f"{factor * seconds.p50:.3g} / {factor * seconds.p99:.3g} {unit}"
