"""The results of forerun bench and forerun demo as text."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Column
from rich.text import Text

from forerun.cli.tables import SafeConsole, table_of, with_ends
from forerun.measure.bench.report import (
    ArmSummary,
    BenchReport,
    BestOfSeveral,
    CellReport,
    faster_chain,
    outcome,
    verdict,
)

HEADINGS = (
    "tokens/s\n(95%)",
    "speedup\n(95%)",
    "tau\nkappa",
    "decoding\n(95%)",
    "4-\ngrams",
)
"""Of the columns after the arm's name; narrow enough for 80 characters."""
LEGEND = (
    "speedup counts the prefill; decoding does not, but for the draft's reading of the prompt\n"
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
        table.add_row(row.arm.name, *figures(row))
    console.print(table, "")
    for row in cell.rows:
        chain = faster_chain(row, cell.rows)
        advice = "" if chain is None else f"; a chain is faster here: {chain.arm.name}"
        console.print(Text.assemble((f"{row.arm.name}: ", "bold"), verdict(row) + advice))
    if cell.best is not None:
        console.print(Text.assemble(("best: ", "bold"), _best_sentence(cell.best)))
    console.print()


def figures(row: ArmSummary) -> tuple[str, ...]:
    tau = 1.0 if row.acceptance_length is None else row.acceptance_length.estimate
    return (
        with_ends(row.tokens_per_s, ".0f"),
        with_ends(row.speedup, ".2f"),
        f"{tau:.2f}\n{row.cycle_cost.estimate:.2f}",
        with_ends(row.decode_speedup, ".2f"),
        f"{row.distinct_4gram_share:.2f}",
    )


def _best_sentence(best: BestOfSeveral) -> str:
    """Return a sentence on the best arm and its speedup on the blocks that did not choose it."""
    return (
        f"{best.summary.arm.name} of {best.num_candidates}, chosen on {best.num_chosen_on} blocks; "
        f"on the other {best.summary.num_groups}: {outcome(best.summary)}"
    )
