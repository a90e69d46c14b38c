"""Prints a run of `forerun tune`: a table per load, what was given up, and what to run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Column

from forerun.cli.tables import SafeConsole, table_of
from forerun.tune.report import TuneReport
from forerun.tune.wording import HEADINGS, LEGEND, list_advice, list_cells, list_given_up


def print_tune(report: TuneReport, changes: Sequence[str] = ()) -> None:
    """Print the tables, the changes since an earlier run, and the advice last."""
    console = SafeConsole(soft_wrap=True)
    for result in report.loads:
        table = table_of(Column(HEADINGS[0]), *HEADINGS[1:], title=result.load.label)
        for arm in result.arms:
            if arm.num_blocks:
                table.add_row(*list_cells(report, arm))
        console.print(table, "")
        _print_list(console, "given up:", list_given_up(result))
    _print_list(console, "prompts left out:", report.left_out)
    console.print(LEGEND, "", sep="\n", markup=False)
    _print_list(console, "since the earlier run:", changes)
    for item in list_advice(report):
        lines = [item.sentence] if item.command is None else [item.sentence, f"  {item.command}"]
        console.print(*lines, sep="\n", markup=False)


def _print_list(console: SafeConsole, title: str, lines: Sequence[str]) -> None:
    if lines:
        console.print(title, *(f"  {line}" for line in lines), "", sep="\n", markup=False)
