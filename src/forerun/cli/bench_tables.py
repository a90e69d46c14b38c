"""The results of forerun bench and forerun demo as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.panel import Panel
from rich.table import Column
from rich.text import Text

from forerun.cli.session import ColouredText, legend
from forerun.cli.tables import SafeConsole, rates, table_of, with_ends
from forerun.measure.bench.comparison import Example
from forerun.measure.bench.report import (
    ArmSummary,
    BenchReport,
    BestOfSeveral,
    CellReport,
    DemoReport,
    faster_chain,
    outcome,
    verdict,
)

HEADINGS = (
    "tokens/s\n(95%)",
    "speedup\n(95%)",
    "tau\nkappa",
    "predicted\n(95%)",
    "decoding\n(95%)",
    "4-\ngrams",
)
"""Of the columns after the arm's name; narrow enough for 80 characters."""
LEGEND = (
    "speedup counts the prefill; decoding does not, but for the draft's reading of the prompt\n"
    "predicted: decoding, by what the passes of this pair cost when they were measured\n"
    "tau: tokens per step; kappa: a step in plain steps; 4-grams: share that is distinct"
)


def print_comparison(report: BenchReport) -> None:
    """Print one table per cell, verdicts, and the machine and versions of the measurement."""
    console = SafeConsole()
    for cell in report.cells:
        if cell.rows:
            _print_cell(console, cell)
        else:
            console.print(f"{escape(cell.title)}: too few blocks for a table", "")
    console.print(f"[dim]{LEGEND}[/]")
    console.print(f"[dim]{escape(report.provenance.line)}[/]")


def _print_cell(console: SafeConsole, cell: CellReport) -> None:
    """Print the table and the verdicts of one cell, and the best of several arms."""
    table = table_of(Column("arm", no_wrap=True), *HEADINGS, title=cell.title)
    for row in cell.rows:
        table.add_row(row.arm.name, *figures(cell, row))
    console.print(table, "")
    for row in cell.rows:
        chain = faster_chain(row, cell.rows)
        advice = "" if chain is None else f"; a chain is faster here: {chain.arm.name}"
        console.print(Text.assemble((f"{row.arm.name}: ", "bold"), verdict(row) + advice))
    if cell.best is not None:
        console.print(Text.assemble(("best: ", "bold"), _best_sentence(cell.best)))
    console.print()


def figures(cell: CellReport, row: ArmSummary) -> tuple[str, ...]:
    prediction = cell.predictions.get(row.arm.name)
    return (
        with_ends(row.tokens_per_s, ".0f"),
        with_ends(row.speedup, ".2f"),
        f"{row.acceptance_length:.2f}\n{row.cycle_cost:.2f}",
        with_ends(prediction.decode_speedup, ".2f") if prediction else "",
        with_ends(row.decode_speedup, ".2f"),
        f"{row.distinct_4gram_share:.2f}",
    )


def _best_sentence(best: BestOfSeveral) -> str:
    """Return a sentence on the best arm and its speedup on the blocks that did not choose it."""
    return (
        f"{best.summary.arm.name} of {best.num_candidates}, chosen on {best.num_chosen_on} blocks; "
        f"on the other {best.summary.num_blocks}: {outcome(best.summary)}"
    )


PROMPT_LINES = 6
SMALL_TARGET = "zoo:code-11m"
SMALL_TARGET_NOTE = (
    "Why drafts hardly pay here: the 21 MB of this target stay in the processor's cache, so a "
    "plain step is short and each row that is verified adds to it. The weights of zoo:code-40m "
    "(forerun demo without --model) are read from memory in every step; more rows cost little."
)
DEMO_HEADINGS = (
    "tokens/s\n(95%)",
    "speedup\n(95%)",
    "tokens\nper\nstep",
    "accepted by\nposition",
    "accepted\nof drafted\n(even at)",
)
"""Of the columns after the arm's name; narrow enough for 80 characters."""


def print_report(report: DemoReport, example: Example | None) -> None:
    """Print the demonstration: tables, verdicts, a coloured completion, the exactness check."""
    console = SafeConsole()
    _print_rows(console, report.rows, "Greedy (T=0), completions cut before they loop")
    if report.config.target == SMALL_TARGET:
        console.print(escape(SMALL_TARGET_NOTE), "")
    if report.edit_rows:
        _print_rows(console, report.edit_rows, "Greedy, prompts that ask for an edit")
    if report.sampled_rows:
        _print_rows(console, report.sampled_rows, "Sampled (T=1)")
    if example is not None:
        console.print(Panel(coloured(example), title="where every token came from"))
        console.print(legend(), "", sep="\n")
    if report.exactness is not None:
        style = "green" if report.exactness.passed else "bold red"
        console.print(f"[bold]exactness[/] [{style}]{escape(report.exactness.sentence)}[/]")
    console.print(f"[dim]{escape(report.provenance.line)}[/]")


def coloured(example: Example) -> Text:
    """Return the end of the prompt, dim, and the completion coloured by token source."""
    tail = "\n".join(example.prompt.splitlines()[-PROMPT_LINES:])
    lead = Text(tail + "\n" * example.prompt.endswith("\n"), style="dim")
    found = example.completion
    take = ColouredText(example.tokenizer).take
    return lead.append_text(take(found.text, found.token_ids, found.sources))


def _print_rows(console: SafeConsole, rows: Sequence[ArmSummary], title: str) -> None:
    table = table_of(
        Column("arm", no_wrap=True), *DEMO_HEADINGS, title=f"{title}, {rows[0].num_blocks} prompts"
    )
    for row in rows:
        table.add_row(
            row.arm.name,
            with_ends(row.tokens_per_s, ".0f"),
            with_ends(row.speedup, ".2f"),
            f"{row.acceptance_length:.2f}",
            rates(row.acceptance.acceptance_rate_per_position, most=3),
            _rate_and_break_even(row),
        )
    console.print(table, "")
    for row in rows:
        console.print(Text.assemble((f"{row.arm.name}: ", "bold"), _plain_verdict(row)))
    shares = ", ".join(f"{row.distinct_4gram_share:.2f}" for row in rows)
    console.print(f"[dim]distinct 4-grams of the texts: {shares}[/]")
    console.print()


def _plain_verdict(row: ArmSummary) -> str:
    """Return a sentence on whether an arm is faster, with tokens per step and cost per step."""
    if row.arm.num_speculative_tokens == 0:
        return f"the baseline, one pass of the target per token, {1000.0 * row.step_s:.1f} ms each"
    costs = f"takes as long as {row.cycle_cost:.1f} plain steps"
    return f"{outcome(row)}: a step emits {row.acceptance_length:.1f} tokens and {costs}"


def _rate_and_break_even(row: ArmSummary) -> str:
    rate = row.acceptance.draft_acceptance_rate
    if rate is None or row.break_even is None:
        return ""
    return f"{rate:.2f}\n({max(0.0, row.break_even):.2f})"
