"""`forerun plan`: choose drafter, K and batch size, and predict their speedup."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Column, Table

from forerun.cli.command import Command
from forerun.cli.flags import check_plot
from forerun.cli.plan_inputs import PlanOptions, candidates_of
from forerun.cli.tables import SafeConsole, table_of

if TYPE_CHECKING:
    from forerun.plan.advice import Advice, BreakEven
    from forerun.plan.config import PlanConfig
    from forerun.plan.option import DraftCandidate, Option
    from forerun.plan.what_if import Scenario


def run(options: PlanOptions) -> int:
    check_plot(options.plot)

    from forerun.plan.advice import advise
    from forerun.plan.what_if import scenarios

    found, config = candidates_of(options)
    advice = advise(found, config)
    what_if = tuple(scenarios(found, config, advice.best.batch))
    if options.json:
        print(json.dumps(content(advice, what_if, config, found, options)))
    else:
        _print_plan(advice, what_if, config, origin(options, found))
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
    return str(options.trace) if candidate.acceptance.num_requests else "given"


def content(
    advice: Advice,
    what_if: Sequence[Scenario],
    config: PlanConfig,
    candidates: Sequence[DraftCandidate],
    options: PlanOptions,
) -> dict[str, object]:
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
        "--trace bench.jsonl",
        "forerun plan --machine h100-sxm --target-params 8e9 --draft-params 1e9 "
        "--kv-token-bytes 131072 --acceptance 0.75 --slo-tpot 0.02",
        "forerun plan --machine h100-sxm --profile profile.json --acceptance 0.8,0.66,0.5 --json",
    ),
)


LEGEND = (
    "speedup: tau / kappa, decoding alone; tau: tokens per step; kappa: a step in plain steps\n"
    "even at: the accepted / drafted, the constant alpha and the cost of a drafted token\n"
    "(in plain steps) at which speculation gains nothing"
)


def _print_plan(
    advice: Advice, what_if: Sequence[Scenario], config: PlanConfig, origin: Sequence[str]
) -> None:
    """Print the plan, the best options by batch size, break-even points and alternatives."""
    console = SafeConsole()
    console.print(f"[bold]{escape(sentence(advice, config))}[/]", "", soft_wrap=True, sep="\n")
    console.print(batches(advice, config), "")
    console.print(break_even(advice), "")
    console.print(scenarios(what_if, advice), "")
    for remark in advice.remarks:
        console.print(f"[yellow]{escape(remark)}[/]", soft_wrap=True)
    console.print(f"[dim]{LEGEND}[/]", soft_wrap=True)
    for line in origin:
        console.print(f"[dim]{escape(line)}[/]", soft_wrap=True)


def sentence(advice: Advice, config: PlanConfig) -> str:
    best = advice.best
    where = f"at batch {best.batch}, context {config.context}, T={config.temperature:g}"
    speed = f"{best.tokens_per_s:.4g} tokens/s, {milliseconds(best.tpot_s)} ms per token"
    if best.is_plain:
        return f"decode plainly {where}: {speed}; {elsewhere(advice)}"
    return (
        f"draft with {best.draft}, {best.shape}, {where}: {speed}, "
        f"{with_ends(best)} times plain decoding"
    )


def elsewhere(advice: Advice) -> str:
    """Return a sentence on the batch size with the fastest draft, for plans of plain decoding."""
    paying = [option for option in advice.per_batch if not option.is_plain]
    if not paying:
        return "no draft pays"
    best = max(paying, key=lambda option: option.speedup.estimate)
    return (
        f"no draft pays there, but {best.draft} at {best.shape} does at batch "
        f"{best.batch}: {with_ends(best)} times plain decoding"
    )


def batches(advice: Advice, config: PlanConfig) -> Table:
    table = table_of(Column("batch", no_wrap=True), *headings(advice))
    for option in advice.per_batch:
        late = config.slo_tpot_s is not None and option.tpot_s > config.slo_tpot_s
        table.add_row(f"{option.batch}{' (too slow)' if late else ''}", *cells(option, advice))
    return table


def headings(advice: Advice) -> tuple[str, ...]:
    if len(advice.curves) > 1:
        return ("drafter", "K", "speedup (95%)", "ms/token")
    return ("K", "tau", "kappa", "speedup (95%)", "ms/token", "tokens/s")


def break_even(advice: Advice) -> Table:
    table = table_of(
        Column("even at", overflow="fold"), "K", "accepted / drafted", "alpha", "draft cost"
    )
    for name, found in advice.break_even:
        table.add_row(escape(name), *limits(found))
    return table


def limits(found: BreakEven) -> tuple[str, ...]:
    """Return the cells of one line of the table of break-even points."""
    alpha, rate = found.acceptance_probability, found.draft_acceptance_rate
    return (
        str(found.num_speculative_tokens),
        f"{rate:.3f}" if rate <= 1 else f"{rate:.3f} (never)",
        "never" if alpha is None else f"{alpha:.3f}",
        f"{found.draft_cost:.3f}" if found.draft_cost >= 0 else "never",
    )


def scenarios(what_if: Sequence[Scenario], advice: Advice) -> Table:
    """Return the table of changed conditions with the best option under each."""
    table = table_of(Column("what if", no_wrap=True), *headings(advice))
    for scenario in what_if:
        table.add_row(escape(scenario.name), *cells(scenario.option, advice))
    return table


def cells(option: Option, advice: Advice) -> tuple[str, ...]:
    """Return the cells of an option except its batch size, in the order of `headings`."""
    k = "plain" if option.is_plain else option.shape.removeprefix("K=")
    speedup = "1" if option.is_plain else with_ends(option)
    latency = milliseconds(option.tpot_s)
    if len(advice.curves) > 1:
        return escape(short(option.draft, advice)), k, speedup, latency
    tau, kappa = option.acceptance_length.estimate, option.cycle_cost.estimate
    return k, f"{tau:.2f}", f"{kappa:.2f}", speedup, latency, f"{option.tokens_per_s:.4g}"


def short(name: str | None, advice: Advice) -> str:
    """Return the last part of a drafter's path if it is unique, else the whole path."""
    if name is None:
        return ""
    last = [Path(other).name for other, _ in advice.curves]
    return Path(name).name if last.count(Path(name).name) == 1 else name


def with_ends(option: Option) -> str:
    found = option.speedup
    if found.low == found.high:
        return f"{found.estimate:.2f}"
    return f"{found.estimate:.2f} ({found.low:.2f}–{found.high:.2f})"


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds as text."""
    return f"{1e3 * seconds:.3g}"
