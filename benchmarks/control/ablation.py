"""What each mechanism of the `auto` controller is worth: switched off alone, in the simulator.

    python benchmarks/control/ablation.py --out FILE [--only NAME ...] [--seeds 4]

The controllers are the engine's own. The time of every simulated step is the profile's, times a
lognormal factor (sigma 0.1) and, in one step of 50, times 2.5, because a mechanism that guards
against noise looks useless without any. The cost of a decision is not in simulated time. Every
figure is a ratio to `auto` as it is, on the same requests, paired by seed, with a 95% interval (t)
over seeds. "Safety" is the same for the speed in the slowest phase over that of plain decoding in
that phase. With many variants in 11 cases, a few intervals exclude 1 by chance.
"""

from __future__ import annotations

import argparse
import json
import math
import random  # noqa: TID251  # noise of simulated machines, seeded
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from unittest.mock import patch

import variants as variants_of
from scipy import stats

from forerun.control.base import Controller, Tree
from forerun.control.named import FixedController
from forerun.measure.profile import load_profile
from forerun.plan.simulation import (
    CycleTimes,
    Result,
    Server,
    SimulatedCycle,
    SimulatedRequest,
    Times,
    count_levels,
    draw_requests,
    summarise,
)
from forerun.plan.workload import (
    Constant,
    Phase,
    SimulatedServerConfig,
    Slo,
    Uniform,
    Workload,
)
from forerun.provenance import collect
from forerun.theory.cost import CostTable, DraftCosts

HERE = Path(__file__).parent
PROFILES = {
    "deep": HERE.parent / "simulate" / "profile-deep.json",
    "shipped": HERE.parent / "profiles" / "shipped-pair.json",
    "292m": HERE.parent / "profiles" / "292m.json",
}
METHOD, OTHER = "draft_model", "other"
MAX_K = 8
SIGMA, STALL_EVERY, STALL = 0.1, 50, 2.5
ORACLE_KS = (0, 1, 2, 3, 4, 6, 8)
ORACLE_TREES = tuple(map(Tree.parse, ("3,1,4", "5,2,4", "7,2,4", "7,3,4", "8,3,4")))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One workload.

    Attributes:
        profile: name of the costs.
        alphas: of the phases; a tuple within is a mixture of equally many requests of each.
        batch: sequences decoded at once.
        requests: how many.
        other_alphas: of a second drafter, by phase; None without one.
        tpot: time target in plain steps; None without one.
        draft_factor: true cost of a drafted token over what the profile says.
        row_factor: the same of what a row adds to a target pass.
        siblings: P(a further child of a tree is accepted | those before are not); None: no trees.
    """

    profile: str
    alphas: tuple[float | tuple[float, ...], ...]
    batch: int = 1
    requests: int = 12
    other_alphas: tuple[float, ...] | None = None
    tpot: float | None = None
    draft_factor: float = 1.0
    row_factor: float = 1.0
    siblings: float | None = None


CASES: Mapping[str, Case] = {
    "good": Case(profile="deep", alphas=(0.8,)),
    "useless": Case(profile="deep", alphas=(0.03,)),
    "good, useless, good": Case(profile="deep", alphas=(0.8, 0.03, 0.8), requests=15),
    "mixed": Case(profile="deep", alphas=((0.85, 0.3),)),
    "good, batch 8": Case(profile="shipped", alphas=(0.8,), batch=8, requests=40),
    "useless, batch 8": Case(profile="shipped", alphas=(0.03,), batch=8, requests=40),
    "mixed, batch 8, time target": Case(
        profile="deep", alphas=((0.85, 0.3),), batch=8, requests=40, tpot=0.9
    ),
    "two drafters": Case(profile="deep", alphas=(0.8, 0.3), other_alphas=(0.4, 0.85), requests=14),
    "trees pay": Case(profile="292m", alphas=(0.5,), siblings=0.4),
    "trees pay a little": Case(profile="292m", alphas=(0.7,), siblings=0.4),
    "trees do not pay": Case(profile="292m", alphas=(0.7,), siblings=0.05),
    "draft 6 times as costly as profiled": Case(profile="deep", alphas=(0.6,), draft_factor=6.0),
    "rows 6 times as costly as profiled": Case(profile="deep", alphas=(0.6,), row_factor=6.0),
    "the other drafter becomes better": Case(
        profile="deep", alphas=(0.6, 0.6), other_alphas=(0.3, 0.85), requests=14
    ),
    "0.75, small target": Case(profile="shipped", alphas=(0.75,)),
    "useless, small target": Case(profile="shipped", alphas=(0.03,)),
}


class NoisyTimes(Times):
    """Times of a table, every step of which is held up by something else as well."""

    def __init__(self, table: Any, reading: Any, row_factor: float, seed: int) -> None:
        super().__init__(table, reading)
        self.row_factor = row_factor
        self.random = random.Random(seed)

    def at(self, batch: int, num_tokens: int) -> CycleTimes:
        """The cycle's own times."""
        factor = self.random.lognormvariate(0.0, SIGMA)
        if self.random.random() < 1.0 / STALL_EVERY:
            factor *= STALL
        return Scaled(super().at(batch, num_tokens), factor, self.row_factor)  # type: ignore[return-value]


class Scaled:
    """Times of a cycle, all by a factor, and what rows add to its pass by another."""

    def __init__(self, times: CycleTimes, factor: float, row_factor: float) -> None:
        self.times, self.factor, self.row_factor = times, factor, row_factor
        self.plain_s = times.plain_s * factor
        self.draft_s = [seconds * factor for seconds in times.draft_s]

    def pass_s(self, num_rows: int) -> float:
        """See `CycleTimes`."""
        plain_s = self.times.plain_s
        above_s = self.times.pass_s(num_rows) - plain_s
        return (plain_s + above_s * (self.row_factor if above_s > 0 else 1.0)) * self.factor

    def overhead_s(self, depth: int) -> float:
        """See `CycleTimes`."""
        return self.times.overhead_s(depth) * self.factor


class SeveralDrafters(Server):
    """Drafts are accepted as the plan's drafter is; the other one costs a tenth."""

    other_alphas: Sequence[float] | None = None

    def verify(self, request: SimulatedRequest) -> int:
        """See `Server`."""
        if self.other_alphas is None or request.plan.method != OTHER:
            return super().verify(request)
        own = request.alphas
        request.alphas = (self.other_alphas[request.phase],) * MAX_K
        gained = super().verify(request)
        request.alphas = own
        return gained

    def spend(
        self, cycle: SimulatedCycle, times: CycleTimes, requests: Sequence[SimulatedRequest]
    ) -> None:
        """See `Server`."""
        super().spend(cycle, times, requests)
        others = [request for request in requests if request.plan.method == OTHER]
        if others:
            cycle.draft_s -= 0.9 * sum(times.draft_s[b] for b in count_levels(others))


def workload_of(case: Case, costs: DraftCosts) -> Workload:
    """The workload of a case."""

    share = 1.0 / len(case.alphas)
    plain_s = costs.greedy.plain_step_s(256, case.batch)
    return Workload(
        requests=case.requests,
        prompt_tokens=64,
        output_tokens=Uniform(least=150, most=350),
        phases=tuple(
            Phase(share=share, acceptance=Constant(alpha=a if isinstance(a, float) else a[0]))
            for a in case.alphas
        ),
        server=SimulatedServerConfig(max_batch=case.batch, max_k=MAX_K),
        sibling_acceptance=case.siblings or 0.0,
        slo=Slo(tpot_s=None if case.tpot is None else case.tpot * plain_s),
    )


def requests_of(case: Case, workload: Workload, seed: int) -> list[SimulatedRequest]:
    """The requests of a case, those of a mixture with acceptance and tags drawn one by one."""
    requests = draw_requests(workload, seed)
    drawn = random.Random(seed)
    for request in requests:
        mixture = case.alphas[request.phase]
        if isinstance(mixture, tuple):
            alpha = drawn.choice(mixture)
            request.alphas, request.tags = (alpha,) * MAX_K, (f"a{alpha}",)
    return requests


def with_drafting_times(table: CostTable, factor: float) -> CostTable:
    """The table of a drafter whose tokens take `factor` times as long."""
    lines = [replace(line, draft_s=factor * line.draft_s) for line in table.lines]
    return CostTable(lines=tuple(lines))


def costs_of(case: Case) -> dict[str, DraftCosts]:
    """What the controller is told."""
    costs = load_profile(PROFILES[case.profile]).costs
    if case.other_alphas is None:
        return {METHOD: costs}
    cheap = with_drafting_times(costs.greedy, 0.1)
    return {METHOD: costs, OTHER: DraftCosts(greedy=cheap, sampled=cheap)}


def run(case: Case, make: Callable[[Mapping[str, DraftCosts]], Controller], seed: int) -> Result:
    """One controller on one case."""
    costs = costs_of(case)
    table = with_drafting_times(costs[METHOD].greedy, case.draft_factor)
    workload = workload_of(case, costs[METHOD])
    times = NoisyTimes(table, costs[METHOD].reading, case.row_factor, seed)
    controller: Any = make(costs)
    if case.siblings is not None and not isinstance(controller, FixedController):
        controller.tree_methods = (METHOD,)
    server = SeveralDrafters(workload, times, controller)
    server.other_alphas = case.other_alphas
    requests = requests_of(case, workload, seed)
    server.serve(requests)
    return summarise("", workload, server, requests)


def rates(result: Result) -> list[float]:
    """Tokens per request-second, by phase."""
    return [phase.num_tokens / phase.decode_s for phase in result.phases]


@contextmanager
def switched(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """The modules with something in them replaced."""
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value))
        yield


def measure(job: tuple[str, int, tuple[str, ...]]) -> list[dict[str, Any]]:
    """All variants on one case with one seed."""
    name, seed, wanted = job
    case = CASES[name]
    plain = run(case, lambda costs: FixedController(0), seed)
    shapes = [*ORACLE_KS[1:], *(ORACLE_TREES if case.siblings is not None else ())]
    fixed = [run(case, lambda costs, shape=shape: FixedController(shape), seed) for shape in shapes]
    best_s = sum(
        min(result.phases[at].decode_s for result in (plain, *fixed))
        for at in range(len(plain.phases))
    )
    found = []
    for variant in wanted:
        changes, make = variants_of.VARIANTS[variant]
        with switched(changes):
            result = run(case, lambda costs, make=make: make(costs, MAX_K), seed)
        decode_s = sum(phase.decode_s for phase in result.phases)
        found.append(
            {
                "case": name,
                "seed": seed,
                "variant": variant,
                "goodput": sum(phase.num_tokens for phase in result.phases) / decode_s,
                "regret": decode_s / best_s - 1.0,
                "safety": min(a / b for a, b in zip(rates(result), rates(plain), strict=True)),
                "in_time": result.num_in_slo / result.num_requests,
            }
        )
    return found


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean with its 95% interval."""
    mean = fmean(values)
    half = stdev(values) / math.sqrt(len(values)) * float(stats.t.ppf(0.975, len(values) - 1))
    return mean, mean - half, mean + half


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per variant and case: goodput and safety over those of `auto`, and the regret."""
    by = {(row["variant"], row["case"], row["seed"]): row for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    found = []
    for variant, case in dict.fromkeys((row["variant"], row["case"]) for row in rows):
        pairs = [(by[variant, case, seed], by["auto", case, seed]) for seed in seeds]
        found.append(
            {
                "variant": variant,
                "case": case,
                "goodput": interval([own["goodput"] / auto["goodput"] for own, auto in pairs]),
                "safety": interval([own["safety"] / auto["safety"] for own, auto in pairs]),
                "regret": interval([own["regret"] for own, _ in pairs]),
                "speed_over_plain": interval([own["safety"] for own, _ in pairs]),
                "in_time": interval([own["in_time"] - auto["in_time"] for own, auto in pairs]),
            }
        )
    return found


def changes_something(row: Mapping[str, Any]) -> bool:
    """Whether goodput or safety is shown to change by 1% or more."""
    return any(row[n][2] <= 0.99 or row[n][1] >= 1.01 for n in ("goodput", "safety"))


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", help="variants beside auto; without it, all")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    wanted = ("auto", *(arguments.only or [n for n in variants_of.VARIANTS if n != "auto"]))
    jobs = [(name, seed, wanted) for name in arguments.cases for seed in range(arguments.seeds)]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(arguments.processes) as pool:
        for number, found in enumerate(pool.map(measure, jobs), start=1):
            rows += found
            print(f"{number} of {len(jobs)}", file=sys.stderr, flush=True)
    table = summary(rows)
    for row in table:
        if row["variant"] == "auto" or changes_something(row):
            figures = "  ".join(
                f"{n} {row[n][0]:.3f} ({row[n][1]:.3f} to {row[n][2]:.3f})"
                for n in ("goodput", "safety", "regret", "speed_over_plain")
            )
            print(f"{row['variant']:<34} {row['case']:<36} {figures}")
    silent = {row["variant"] for row in table} - {
        row["variant"] for row in table if changes_something(row)
    }
    print("changes nothing by 1%:", ", ".join(sorted(silent - {"auto"})))
    content = {"table": table, "rows": rows, "provenance": collect({}).to_dict()}
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
