"""The report of `forerun align` for people."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from forerun.align.report import AlignReport
from forerun.cli.align_tables import print_changes, print_drafts, print_ledger

__all__ = ["print_report"]


def print_report(report: AlignReport) -> None:
    """What changed, where the rest is, where the draft is."""
    console = Console(highlight=False)
    for pair in report.judged:
        print_drafts({"before": pair.before, "after": pair.after})
        print_changes(pair.changes)
        console.print()
    print_ledger(report.ledger)
    step, num_steps = report.best_step, report.judgements[-1].step
    if step == 0:
        console.print("[yellow]No step of the training promised more than the draft before.[/]")
    console.print(
        f"kept step {step} of {num_steps}: {report.data.num_learned_tokens:,} tokens of "
        f"{report.data.num_samples:,} texts, objective {report.objective}"
    )
    console.print(f"draft: {escape(str(report.draft))}")
    console.print(f"[dim]{escape(report.provenance.line)}[/]")
