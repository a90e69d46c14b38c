"""forerun trace: the contents of a trace."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.markup import escape
from rich.table import Column, Table
from tyro.conf import Positional, arg

from forerun.cli.command import Command
from forerun.cli.tables import SafeConsole, table_of
from forerun.errors import InvalidTrace

if TYPE_CHECKING:
    from forerun.trace.summary import GroupSummary, MeasuredCycleCost, TraceSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Options of `forerun trace`."""

    action: Annotated[Positional[Literal["summarize"]], arg(metavar="summarize")]
    """Tokens per step, cost per step, acceptance by position, per tag, where the time went."""
    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """What --trace wrote: a .jsonl file."""
    json: bool = False
    """Print one JSON object."""


def run(options: TraceOptions) -> int:
    """Summarise a trace; damaged records are listed, and all others are read."""
    from forerun.trace.files import read_trace
    from forerun.trace.summary import summarise

    summary = summarise(read_trace(options.file))
    if not (summary.headers or summary.overall.num_requests or summary.overall.num_steps):
        raise InvalidTrace(
            f"{options.file} holds no records; write one with `forerun generate --trace FILE.jsonl`"
        )
    if options.json:
        print(json.dumps(summary.to_dict()))
    else:
        _print_summary(summary)
    return 0


BAR_WIDTH = 24
LEGEND = (
    "beta: of the steps that drafted a position, the share accepted through it;\n"
    "survival corrects for drafts that ended early. Steps of one request depend on\n"
    "each other: intervals over few requests are too narrow.\n"
    "tau: tokens per drafting step; kappa: its time in plain steps."
)


def _print_summary(summary: TraceSummary) -> None:
    """Print the figures of a trace: run, acceptance by position, tags, time and damage."""
    console = SafeConsole()
    for header in summary.headers:
        draft = f", draft {header.draft}" if header.draft else ""
        line = f"target {header.target}{draft}, {header.device}"
        console.print(f"[bold]{escape(line)}[/]", soft_wrap=True)
    for line in figures(summary):
        console.print(escape(line), soft_wrap=True)
    if summary.overall.positions:
        console.print("", _positions_table(summary.overall))
    if summary.tags:
        console.print("", _tags_table(summary))
    if summary.overall.positions:
        console.print(f"\n[dim]{LEGEND}[/]")
    _print_damage(console, summary)


def figures(summary: TraceSummary) -> Iterator[str]:
    overall = summary.overall
    if not overall.num_steps:
        yield "no steps"
        return
    unfinished = f", {summary.num_unfinished} of them unfinished" if summary.num_unfinished else ""
    yield (
        f"{overall.num_requests} requests{unfinished}, {overall.num_steps} steps, "
        f"{overall.num_tokens} tokens"
    )
    if summary.median_ttft_s is not None:
        yield f"first token after {1000 * summary.median_ttft_s:.1f} ms (median)"
    yield from drafting(summary)
    yield _time_line(summary)


def drafting(summary: TraceSummary) -> Iterator[str]:
    """Return tau, kappa, and how many drafted tokens were accepted."""
    overall, counts = summary.overall, summary.overall.acceptance
    if counts.acceptance_length is None or overall.wasted_share is None:
        yield "nothing was drafted"
        return
    cost = summary.cycle_cost
    yield (
        f"tau {counts.acceptance_length:.3f} over {counts.num_steps} drafting steps, "
        f"kappa {kappa(cost, counts.acceptance_length)}"
    )
    if summary.speedup is not None:
        yield f"decoding {summary.speedup:.2f}x plain, steps without a draft included"
    yield (
        f"{counts.num_drafted} drafted, {counts.num_accepted} accepted "
        f"({overall.expected_accepted:.1f} expected), {overall.wasted_share:.1%} wasted"
    )


def kappa(cost: MeasuredCycleCost | None, tau: float) -> str:
    """Return the cost of a drafting step and what follows for these steps, or why it is unknown."""
    from forerun.trace.summary import MIN_PLAIN_STEPS

    if cost is None:
        return f"unknown: fewer than {MIN_PLAIN_STEPS} plain steps to compare with"
    skipped = f", {cost.num_uncompared} steps not compared" if cost.num_uncompared else ""
    return f"{cost.estimate:.3f}, so {tau / cost.estimate:.2f}x in these steps{skipped}"


def _time_line(summary: TraceSummary) -> str:
    times = summary.times
    total_s = times.total_s or 1.0
    shares = (
        f"{name} {seconds / total_s:.1%}"
        for name, seconds in (
            ("draft", times.draft_s),
            ("verify", times.verify_s),
            ("other", times.other_s),
        )
    )
    return (
        f"{times.total_s:.3f} s in {times.num_cycles} cycles, {summary.num_prefill_cycles} of them "
        f"reading prompts: {', '.join(shares)}"
    )


def _positions_table(group: GroupSummary) -> Table:
    table = table_of(Column("position"), "drafted", "accepted", "beta (95%)", "survival")
    table.add_column("", no_wrap=True)
    for number, position in enumerate(group.positions, start=1):
        rate = position.rate
        table.add_row(
            str(number),
            str(position.num_drafted),
            str(position.num_accepted),
            f"{rate.estimate:.3f} ({rate.low:.3f}–{rate.high:.3f})",
            f"{position.survival:.3f}",
            "█" * round(BAR_WIDTH * position.survival),
        )
    return table


def _tags_table(summary: TraceSummary) -> Table:
    headings = ("requests", "tokens", "tau", "kappa", "wasted", "beta 1, 2, 3")
    table = table_of(Column("tag", overflow="fold"), *headings)
    plain: Mapping[int, float] = summary.plain_step_s
    for tag, group in summary.tags.items():
        tau, cost = group.acceptance.acceptance_length, group.costs.cycle_cost(plain)
        table.add_row(
            escape(tag),
            str(group.num_requests),
            str(group.num_tokens),
            "" if tau is None else f"{tau:.2f}",
            "" if cost is None else f"{cost.estimate:.2f}",
            "" if group.wasted_share is None else f"{group.wasted_share:.0%}",
            " ".join(f"{position.rate.estimate:.2f}" for position in group.positions[:3]),
        )
    return table


def _print_damage(console: SafeConsole, summary: TraceSummary) -> None:
    if not summary.num_damaged:
        return
    console.print(f"\n[bold red]not read[/] ({summary.num_damaged} places)")
    for place in summary.damage:
        console.print(f"  {escape(str(place))}", soft_wrap=True)
    if summary.num_damaged > len(summary.damage):
        console.print(f"  and {summary.num_damaged - len(summary.damage)} more")


COMMAND = Command(
    options=TraceOptions,
    run=run,
    has_positional=True,
    description="Summarise a trace of `forerun generate` or `forerun bench`. Damaged records are\n"
    "listed, everything else is read.",
    examples=(
        "forerun trace summarize trace.jsonl",
        "forerun trace summarize trace.jsonl --json | jq .overall.acceptance_length",
    ),
)
