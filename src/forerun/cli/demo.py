"""`forerun demo`: plain and speculative decoding of a shipped target, compared and explained."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from forerun.atomic_write import atomic_write
from forerun.cli.command import Command
from forerun.cli.flags import check_threads, shortened
from forerun.cli.tables import SafeConsole, status_text
from forerun.errors import InvalidRequest
from forerun.measure.bench.config import DEMO_DRAFTS, DemoConfig
from forerun.models.architecture import Runner

if TYPE_CHECKING:
    from forerun.measure.bench.comparison import Demo


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Options of `forerun demo`."""

    model: Literal["zoo:code-40m", "zoo:code-11m"] = "zoo:code-40m"
    """The target. zoo:code-11m fits in a processor's cache, where drafts cannot gain much."""
    seconds: float = DemoConfig().seconds
    """Time budget, loading included; a slow machine needs a little more."""
    runner: Runner = DemoConfig().runner
    """Runs the passes; see `forerun generate --help`."""
    threads: int | None = None
    """Threads of the passes. Default: the number with which plain decoding is fastest."""
    out: Path | None = None
    """Write demo.json, demo.png and demo.svg into this folder."""
    json: bool = False
    """Print one JSON object instead of tables."""


def run(options: DemoOptions) -> int:
    """Run the demonstration; returns 1 if speculative text differs from plain text."""
    started_s = time.perf_counter()
    check_threads(options.threads)
    config = DemoConfig(
        target=options.model,
        drafts=DEMO_DRAFTS[options.model],
        seconds=options.seconds,
        runner=options.runner,
        num_threads=options.threads,
    )
    if options.out is not None:
        _make_folder(options.out)

    from forerun.measure.bench.comparison import Demo
    from forerun.models.catalog import edit_prompts, held_out_prompts

    with SafeConsole(stderr=True).status("starting") as status:
        demo = Demo(
            config,
            [prompt.text for prompt in held_out_prompts()],
            [prompt.text for prompt in edit_prompts()],
            clock=time.perf_counter,
            started_s=started_s,
            notify=status_text(status),
        )
        try:
            demo.run()
        except KeyboardInterrupt:
            status.stop()
            if demo.has_results:
                show(demo, options)
            raise
    show(demo, options)
    return 0 if demo.exactness is not None and demo.exactness.passed else 1


def show(demo: Demo, options: DemoOptions) -> None:
    """Print and write the results measured until now."""
    from forerun.cli.bench_tables import print_report
    from forerun.measure.bench.report import plot

    report = demo.report()
    content = json.dumps(report.to_dict(), indent=None if options.json else 1)
    if options.json:
        print(content)
    else:
        print_report(report, demo.example)
    if options.out is not None:
        with atomic_write(options.out / "demo.json") as scratch:
            scratch.write_text(content + "\n", encoding="utf-8")
        panels = {f"T=0, {report.rows[0].num_blocks} held-out prompts": report.rows}
        if report.edit_rows:
            panels[f"edits, T=0, {report.edit_rows[0].num_blocks} prompts"] = report.edit_rows
        plot(panels, report.config.target, [options.out / "demo.png", options.out / "demo.svg"])


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
    description="Compare plain and speculative decoding on a shipped target: a draft trained on\n"
    "other text, drafts made for the target, copying on edits, and the exactness check.",
    examples=(
        "forerun demo",
        "forerun demo --model zoo:code-11m",
        "forerun demo --seconds 120 --out results",
        "forerun demo --json | jq '.rows[] | {name, speedup, verdict}'",
    ),
)
