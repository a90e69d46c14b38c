"""`forerun plan`: which drafter, K and batch to use, and what it should be worth."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import UseAppendAction

from forerun.cli.command import Command
from forerun.cli.machine import MachineFlags
from forerun.cli.paths import check_picture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forerun.plan.advice import Advice
    from forerun.plan.config import PlanConfig
    from forerun.plan.option import DraftCandidate
    from forerun.plan.what_if import Scenario

__all__ = ["COMMAND", "PlanOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `forerun plan`."""

    profile: UseAppendAction[tuple[Path, ...]] = ()
    """What `forerun profile` wrote; one per draft model.
    It may be of another machine: a plan is for where the profile was made."""
    draft: UseAppendAction[tuple[str, ...]] = ()
    """Drafters to compare, by the names in profiles and trace; "suffix" needs no profile.
    Default: every draft of the profiles."""
    acceptance: UseAppendAction[tuple[str, ...]] = ()
    """[DRAFT=]ALPHA, the same at every position, or [DRAFT=]BETA1,BETA2,... by position."""
    conditional: bool = False
    """Figures by position are conditional: given that everything before was accepted."""
    trace: Path | None = None
    """Take the acceptance from this trace of `forerun generate` or `forerun bench`."""
    batch: tuple[int, ...] = ()
    """Sequences at once that are considered. Default: those of the profiles."""
    context: int | None = None
    """Committed tokens of every sequence. Default: the shortest that was profiled."""
    temperature: float = 0.0
    """0 plans for greedy drafts, anything above for sampled ones."""
    max_k: int = 16
    """Most drafted tokens per step."""
    slo_tpot: float | None = None
    """Most seconds per output token; the plan is the highest throughput that keeps it."""
    machine: MachineFlags = field(default_factory=MachineFlags)
    plot: Path | None = None
    """Draw the speedup over K into this .png, .svg or .pdf file."""
    json: bool = False
    """Print one JSON object."""


def run(options: PlanOptions) -> int:
    """Plan and show."""
    if options.plot is not None:
        check_picture("--plot", options.plot)

    from forerun.cli.plan_tables import print_plan
    from forerun.cli.planned import candidates_of
    from forerun.plan.advice import advise
    from forerun.plan.what_if import scenarios

    found, config = candidates_of(options)
    advice = advise(found, config)
    what_if = tuple(scenarios(found, config, advice.best.batch))
    if options.json:
        print(json.dumps(content(advice, what_if, config, found, options)))
    else:
        print_plan(advice, what_if, config, origin(options, found))
    if options.plot is not None:
        from forerun.plan.plot import plot

        plot(advice, options.plot)
    return 0


def origin(options: PlanOptions, candidates: Sequence[DraftCandidate]) -> list[str]:
    """What the plan rests on."""
    machine = options.machine.chosen
    costs = "costs: " + (
        ", ".join(map(str, options.profile))
        if machine is None
        else f"roofline of {machine.name} ({machine.source}; {1e6 * machine.launch_s:.0f} us per "
        f"pass, {1e6 * machine.step_s:.0f} us per step)"
    )
    return [costs, *(f"acceptance of {c.name}: {source(c, options)}" for c in candidates)]


def source(candidate: DraftCandidate, options: PlanOptions) -> str:
    """Where its acceptance is from."""
    return str(options.trace) if candidate.acceptance.num_requests else "given"


def content(
    advice: Advice,
    what_if: Sequence[Scenario],
    config: PlanConfig,
    candidates: Sequence[DraftCandidate],
    options: PlanOptions,
) -> dict[str, object]:
    """As JSON wants it."""
    return {
        "config": asdict(config),
        "origin": origin(options, candidates),
        "acceptance": {c.name: list(c.acceptance.survival) for c in candidates},
        **advice.to_dict(),
        "what_if": [scenario.to_dict() for scenario in what_if],
    }


COMMAND = Command(
    options=PlanOptions,
    run=run,
    description="Which drafter, K and batch to use, what it should be worth and from where on it\n"
    "stops paying. Drafts are chains; token trees are not planned yet.",
    examples=(
        "forerun plan --profile profile.json --acceptance 0.8",
        "forerun plan --profile profile.json --trace trace.jsonl --temperature 1 --batch 1 8",
        "forerun plan --profile a.json --profile b.json --draft a --draft b --draft suffix "
        "--trace bench.parquet",
        "forerun plan --machine h100-sxm --target-params 70e9 --draft-params 1e9 "
        "--kv-token-bytes 327680 --acceptance 0.75 --slo-tpot 0.02",
        "forerun plan --machine h100-sxm --profile profile.json --acceptance 0.8,0.66,0.5 --json",
    ),
)
