"""`forerun explain`: the figures of a trace, and what happened in the steps of a request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Column, Table
from tyro.conf import Positional, arg

from forerun.cli.command import Command
from forerun.cli.tables import SafeConsole, table_of
from forerun.errors import InvalidRequest

if TYPE_CHECKING:
    from forerun.doctor.evidence import Evidence
    from forerun.doctor.readers.trace_totals import TraceTotals

_MOST_STEPS = 3
"""Steps shown in detail where none is named."""
_BAR_WIDTH = 24
_LEGEND = (
    "beta: of the steps that drafted a position, the share accepted through it;\n"
    "survival corrects for drafts that ended early. Steps of one request depend on\n"
    "each other: intervals over few requests are too narrow.\n"
    "tau: tokens per drafting step; kappa: its time in plain steps."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions:
    """Options of `forerun explain`."""

    file: Annotated[Positional[Path], arg(metavar="TRACE")]
    """What --trace wrote: a .jsonl file."""
    request: str | None = None
    """Id of a request, to explain it. Default: the figures of the whole trace."""
    step: int | None = None
    """Show this step of the request, or of the first one of the trace. Default: the first three
    that drafted."""
    json: bool = False
    """Print the figures of the whole trace as one JSON object."""


def run(options: ExplainOptions) -> int:
    """Print the figures of a trace, or the explanation of one request."""
    if options.request is not None or options.step is not None:
        if options.json:
            raise InvalidRequest("--json is for the figures of a whole trace")
        return _explain(options)

    from forerun.doctor.diagnosis import derive
    from forerun.doctor.readers.trace import evidence_of
    from forerun.doctor.readers.trace_totals import read_totals

    totals = read_totals(options.file)
    evidence = derive(evidence_of(totals, options.file.name))
    if options.json:
        facts = {fact.name: fact.to_dict() for fact in evidence}
        sources = [reading.to_dict() for reading in evidence.readings]
        print(json.dumps({"facts": facts, "series": evidence.series, "sources": sources}))
    else:
        _print_summary(totals, evidence)
    return 0


def _explain(options: ExplainOptions) -> int:
    from forerun.doctor.explain import explain_request, in_words
    from forerun.trace.files import read_trace

    found = explain_request(read_trace(options.file), options.request)
    steps = (found.drafting or found.steps)[:_MOST_STEPS]
    if options.step is not None:
        steps = tuple(step for step in found.steps if step.step == options.step)
        if not steps:
            last = found.steps[-1].step
            raise InvalidRequest(f"--step is {options.step}; the request has steps 0 to {last}")
    console = SafeConsole(soft_wrap=True)
    for line in in_words(found, steps):
        console.print(line, markup=False)
    return 0


def _print_summary(totals: TraceTotals, evidence: Evidence) -> None:
    console = SafeConsole()
    for header in totals.headers:
        draft = f", draft {header.draft}" if header.draft else ""
        line = f"target {header.target}{draft}, {header.device}"
        console.print(line, style="bold", markup=False, soft_wrap=True)
    for line in _figures(totals, evidence):
        console.print(line, markup=False, soft_wrap=True)
    if totals.acceptance.num_drafted:
        console.print("", _positions_table(totals))
    if tags := evidence.series.get("tag"):
        table = table_of(Column("tag", overflow="fold"), "drafting steps", "beta 1")
        for tag, rate, num_steps in tags:
            table.add_row(str(tag), f"{num_steps:.0f}", f"{rate:.2f}")
        console.print("", table)
    if totals.acceptance.num_drafted:
        console.print(f"\n{_LEGEND}", style="dim")
    if totals.num_damaged:
        console.print(f"\n[bold red]not read[/] ({totals.num_damaged} places)")
        for place in totals.damage:
            console.print(f"  {place}", markup=False, soft_wrap=True)


def _figures(totals: TraceTotals, evidence: Evidence) -> Iterator[str]:
    known, counts = evidence.number, totals.acceptance
    yield (
        f"{len(totals.requests)} finished requests, {totals.num_steps} steps, "
        f"{totals.num_tokens} tokens"
    )
    if (ttft_s := known("ttft_s")) is not None:
        yield f"first token after {1000 * ttft_s:.1f} ms (median)"
    tau, kappa = counts.acceptance_length, known("cycle_cost")
    if tau is None or not counts.num_drafted:
        yield "nothing was drafted"
    else:
        cost = "unknown: too few plain steps to compare with"
        if kappa:
            cost = f"{kappa:.3f}, so {tau / kappa:.2f}x in these steps"
        yield f"tau {tau:.3f} over {counts.num_steps} drafting steps, kappa {cost}"
        if (speedup := known("speedup")) is not None:
            yield f"decoding {speedup:.2f}x plain, steps without a draft included"
        wasted = 1.0 - counts.num_accepted / counts.num_drafted
        yield (
            f"{counts.num_drafted} drafted, {counts.num_accepted} accepted "
            f"({totals.expected_accepted:.1f} expected), {wasted:.1%} wasted"
        )
    times = totals.cycles.total
    shares = (
        f"{name} {seconds / (times.total_s or 1.0):.1%}"
        for name, seconds in (
            ("draft", times.draft_s),
            ("verify", times.verify_s),
            ("other", times.other_s),
        )
    )
    yield f"{times.total_s:.3f} s in {times.num_cycles} cycles: {', '.join(shares)}"


def _positions_table(totals: TraceTotals) -> Table:
    from forerun.theory.intervals import wilson_interval

    counts = totals.acceptance
    table = table_of(Column("position"), "drafted", "accepted", "beta (95%)", "survival")
    table.add_column("", no_wrap=True)
    columns = counts.drafted_per_position, counts.accepted_per_position, counts.survival
    for number, (drafted, accepted, survival) in enumerate(zip(*columns, strict=True), start=1):
        rate = wilson_interval(accepted, drafted)
        table.add_row(
            str(number),
            str(drafted),
            str(accepted),
            rate.show(".3f"),
            f"{survival:.3f}",
            "█" * round(_BAR_WIDTH * survival),
        )
    return table


COMMAND = Command(
    options=ExplainOptions,
    run=run,
    has_positional=True,
    description="Show the figures of a trace: tokens and cost per step, acceptance by position,\n"
    "where the time went. Of one request: its cycles in order with their times, what became of\n"
    "every drafted token, where the last token comes from, and which K would have been best.",
    examples=(
        "forerun explain trace.jsonl",
        "forerun explain trace.jsonl --request request-3 --step 7",
        "forerun explain trace.jsonl --json | jq .facts.acceptance_length.value",
        'forerun generate "def f(" --temperature 1 --trace t.jsonl --trace-probabilities && '
        "forerun explain t.jsonl --step 2",
    ),
)
