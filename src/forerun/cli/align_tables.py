"""The result of forerun align as text: comparison of drafts, changes, and the ledger of tau."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Column

from forerun.align.evaluation.figures import AcceptanceFigures, DraftFigures, FigureChange, Ledger
from forerun.align.report import AlignReport
from forerun.cli.tables import SafeConsole, rates, table_of, with_ends
from forerun.theory.intervals import Interval

__all__ = ["print_changes", "print_drafts", "print_ledger", "print_report"]

HEADINGS = (
    "tau\n(95%)",
    "alpha\n(95%)",
    "accepted by\nposition",
    "predicted\n(95%)",
    "at the\nbest K",
    "4-\ngrams",
)
"""Of the columns after the draft's name; narrow enough for 80 characters."""
LEGEND = (
    "tau: tokens per step; alpha: acceptance probability on the target's own text;\n"
    "predicted: speedup of decoding by the cost table, at this K and at the best K;\n"
    "4-grams: share that is distinct"
)
WORDS = {
    "acceptance_length": "tau",
    "acceptance_probability": "alpha",
    "speedup": "predicted speedup at this K",
}


def print_drafts(drafts: Mapping[str, DraftFigures]) -> None:
    """Print a table per temperature and K: drafts over all prompts, and by tag.

    Args:
        drafts: by the name they are shown with.
    """
    console = SafeConsole()
    settings = {(d.temperature, d.num_speculative_tokens): None for d in drafts.values()}
    for temperature, k in settings:
        chosen = {
            name: figures
            for name, figures in drafts.items()
            if (figures.temperature, figures.num_speculative_tokens) == (temperature, k)
        }
        print_setting(console, f"T={temperature:g}, K={k}, held-out prompts", chosen)
    console.print(f"[dim]{LEGEND}[/]")


def print_setting(console: SafeConsole, title: str, drafts: Mapping[str, DraftFigures]) -> None:
    """Print the drafts that were evaluated under the same settings."""
    table = table_of(Column("draft", overflow="fold"), *HEADINGS, title=title)
    tags = sorted({tag for figures in drafts.values() for tag in figures.by_tag})
    for name, figures in drafts.items():
        table.add_row(escape(name), *cells(figures.overall))
    for tag in tags if len(tags) > 1 else ():
        table.add_section()
        for name, figures in drafts.items():
            if tag in figures.by_tag:
                label = f"{escape(name)}\n[dim]{escape(tag or 'no tag')}[/]"
                table.add_row(label, *cells(figures.by_tag[tag]))
    console.print(table, "")


def cells(figures: AcceptanceFigures) -> tuple[str, ...]:
    """Return the figures of one table line."""
    speedup = figures.speedup
    betas = [beta.estimate for beta in figures.acceptance_rate_per_position]
    return (
        ends(figures.acceptance_length),
        ends(figures.acceptance_probability),
        rates(betas[:3]) + ("\n" + rates(betas[3:], most=3) if betas[3:] else ""),
        ends(speedup.at_max_k) if speedup else "",
        f"{speedup.best.estimate:.2f}\nK={speedup.num_speculative_tokens}" if speedup else "",
        f"{figures.distinct_4gram_share:.2f}",
    )


def ends(interval: Interval | None) -> str:
    """Return an estimate with its interval on the next line, if it has one."""
    return "" if interval is None else with_ends(interval, ".2f")


def print_changes(changes: Sequence[FigureChange]) -> None:
    """Print per figure whether its intervals before and after alignment show a difference."""
    console = SafeConsole()
    for change in changes:
        over = "" if change.tag is None else f", {change.tag or 'no tag'}"
        console.print(
            f"[bold]{WORDS[change.figure]}{escape(over)}:[/] {in_line(change.before)} -> "
            f"{in_line(change.after)}: {change.finding}"
        )


def in_line(interval: Interval) -> str:
    """Return an estimate followed by its interval."""
    return with_ends(interval, ".2f").replace("\n", " ")


def print_ledger(ledger: Ledger) -> None:
    """Print the measured tau and its gain under each assumption, up to a perfect draft (K + 1)."""
    console = SafeConsole()
    title = f"Where the tokens of a step go: {escape(ledger.draft)}"
    table = table_of(Column("supposing", no_wrap=True), "tokens per step", "gain", title=title)
    table.add_row("as deployed", in_line(ledger.measured), "")
    for item in ledger.items:
        gain = f"{item.gain.estimate:+.2f} ({item.gain.low:+.2f}–{item.gain.high:+.2f})"
        table.add_row(item.name, in_line(item.length), gain)
    table.add_row("a perfect draft (capacity)", f"{ledger.limit:.2f}", in_line(ledger.capacity))
    console.print(table)


def print_report(report: AlignReport) -> None:
    """Print the changes, and the paths of report and draft."""
    console = SafeConsole()
    for pair in report.judged:
        print_drafts({"before": pair.before, "after": pair.after})
        print_changes(pair.changes)
        console.print()
    print_ledger(report.ledger)
    step, num_steps = report.best_step, report.judgements[-1].step
    if step == 0:
        console.print(
            "[yellow]No training step is predicted to be faster than the draft before.[/]"
        )
    console.print(
        f"kept step {step} of {num_steps}: {report.data.num_learned_tokens:,} tokens of "
        f"{report.data.num_samples:,} texts, objective {report.objective}"
    )
    console.print(f"draft: {escape(str(report.draft))}")
    console.print(f"[dim]{escape(report.provenance.line)}[/]")
