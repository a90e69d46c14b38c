"""The demonstration's result for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Column
from rich.text import Text

from forerun.bench.demo import Example
from forerun.bench.report import DemoReport
from forerun.bench.summary import ArmSummary
from forerun.bench.verdict import verdict
from forerun.cli.colour import ColouredText, legend
from forerun.cli.figures import rates
from forerun.cli.tables import table_of, with_ends

__all__ = ["print_report"]

PROMPT_LINES = 6
HEADINGS = (
    "tokens/s\n(95%)",
    "speedup\n(95%)",
    "tokens\nper\nstep",
    "accepted by\nposition",
    "accepted\nof drafted\n(even at)",
)
"""Of the columns after the arm's name; narrow enough for 80 characters."""


def print_report(report: DemoReport, example: Example | None) -> None:
    """Tables, verdicts, one coloured completion, the exactness check, where it was measured."""
    console = Console(highlight=False)
    print_rows(console, report.rows, "Greedy (T=0), completions cut before they loop")
    if report.sampled_rows:
        print_rows(console, report.sampled_rows, "Sampled (T=1)")
    if example is not None:
        console.print(Panel(coloured(example), title="where every token came from"))
        console.print(legend(), "", sep="\n")
    if report.exactness is not None:
        style = "green" if report.exactness.passed else "bold red"
        console.print(f"[bold]exactness[/] [{style}]{escape(report.exactness.sentence)}[/]")
    console.print(f"[dim]{escape(report.provenance.line)}[/]")


def coloured(example: Example) -> Text:
    """The end of the prompt, dim, and the completion in the colours of its sources."""
    tail = "\n".join(example.prompt.splitlines()[-PROMPT_LINES:])
    lead = Text(tail + "\n" * example.prompt.endswith("\n"), style="dim")
    found = example.completion
    take = ColouredText(example.tokenizer).take
    return lead.append_text(take(found.text, found.token_ids, found.sources))


def print_rows(console: Console, rows: Sequence[ArmSummary], title: str) -> None:
    """One table, then one sentence per arm."""
    table = table_of(
        Column("arm", no_wrap=True), *HEADINGS, title=f"{title}, {rows[0].num_blocks} prompts"
    )
    for row in rows:
        table.add_row(
            row.arm.name,
            with_ends(row.tokens_per_s, ".0f"),
            with_ends(row.speedup, ".2f"),
            f"{row.acceptance_length:.2f}",
            rates(row.acceptance.acceptance_rate_per_position, most=3),
            rate_and_break_even(row),
        )
    console.print(table, "")
    for row in rows:
        console.print(Text.assemble((f"{row.arm.name}: ", "bold"), verdict(row)))
    shares = ", ".join(f"{row.distinct_4gram_share:.2f}" for row in rows)
    console.print(f"[dim]distinct 4-grams of the texts: {shares}[/]")
    console.print()


def rate_and_break_even(row: ArmSummary) -> str:
    """Share of drafted tokens accepted, and the share that would cost nothing."""
    rate = row.acceptance.draft_acceptance_rate
    if rate is None or row.break_even is None:
        return ""
    return f"{rate:.2f}\n({max(0.0, row.break_even):.2f})"
