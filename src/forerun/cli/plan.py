"""`forerun plan`: choose drafter, K and batch size, and predict their speedup."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from forerun.cli.command import Command
from forerun.cli.flags import check_picture
from forerun.cli.plan_inputs import PlanOptions, candidates_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forerun.plan.advice import Advice
    from forerun.plan.config import PlanConfig
    from forerun.plan.option import DraftCandidate
    from forerun.plan.what_if import Scenario

__all__ = ["COMMAND"]


def run(options: PlanOptions) -> int:
    """Compute the plan and show it."""
    if options.plot is not None:
        check_picture("--plot", options.plot)

    from forerun.cli.plan_tables import print_plan
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
    """Return lines that state the sources of costs and acceptance."""
    machine = options.machine.chosen
    costs = "costs: " + (
        ", ".join(map(str, options.profile))
        if machine is None
        else f"roofline of {machine.name} ({machine.source}; {1e6 * machine.launch_s:.0f} us per "
        f"pass, {1e6 * machine.step_s:.0f} us per step)"
    )
    return [costs, *(f"acceptance of {c.name}: {source(c, options)}" for c in candidates)]


def source(candidate: DraftCandidate, options: PlanOptions) -> str:
    """Return the source of a candidate's acceptance as text."""
    return str(options.trace) if candidate.acceptance.num_requests else "given"


def content(
    advice: Advice,
    what_if: Sequence[Scenario],
    config: PlanConfig,
    candidates: Sequence[DraftCandidate],
    options: PlanOptions,
) -> dict[str, object]:
    """Return the fields of the JSON output."""
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
    lists={flag: "" for flag in ("--acceptance",)}
    | dict.fromkeys(("--draft", "--profile", "--batch"), ","),
    description="Which drafter, K and batch to use, what it should be worth and from where on it\n"
    "stops paying. Drafts are chains, and trees too with --sibling-acceptance.",
    examples=(
        "forerun plan --profile profile.json --acceptance 0.8",
        "forerun plan --profile profile.json --acceptance 0.5 --sibling-acceptance 0.4",
        "forerun plan --profile profile.json --trace trace.jsonl --temperature 1 --batch 1 8",
        "forerun plan --profile a.json --profile b.json --draft a --draft b --draft suffix "
        "--trace bench.parquet",
        "forerun plan --machine h100-sxm --target-params 8e9 --draft-params 1e9 "
        "--kv-token-bytes 131072 --acceptance 0.75 --slo-tpot 0.02",
        "forerun plan --machine h100-sxm --profile profile.json --acceptance 0.8,0.66,0.5 --json",
    ),
)
