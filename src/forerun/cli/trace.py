"""`forerun trace`: what a trace says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from forerun.cli.command import Command
from forerun.cli.paths import check_picture

__all__ = ["COMMAND", "TraceOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Options of `forerun trace`."""

    action: Annotated[Positional[Literal["summarize"]], arg(metavar="summarize")]
    """Tokens per step, cost per step, acceptance by position, per tag, where the time went."""
    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """What --trace wrote: a .jsonl file, or a .parquet folder."""
    json: bool = False
    """Print one JSON object."""
    plot: Path | None = None
    """Draw survival by position into this .png, .svg or .pdf file."""

    def check(self) -> None:
        """Refuse what would fail after the reading.

        Raises:
            InvalidRequest: the picture cannot be written, or is none.
        """
        if self.plot is not None:
            check_picture("--plot", self.plot)


def run(options: TraceOptions) -> int:
    """Summarise; damage is reported and does not stop what is whole from being read."""
    options.check()

    from forerun.cli.trace_tables import print_summary
    from forerun.trace.files import read_trace
    from forerun.trace.summary import summarise

    summary = summarise(read_trace(options.file))
    if options.json:
        print(json.dumps(summary.to_dict()))
    else:
        print_summary(summary)
    if options.plot is not None:
        from forerun.trace.plot import plot

        plot(summary, options.file.name, options.plot)
    return 0


COMMAND = Command(
    options=TraceOptions,
    run=run,
    description="Say what a trace of `forerun generate` or `forerun bench` holds. Damage is\n"
    "named, everything else is read.",
    examples=(
        "forerun trace summarize trace.jsonl",
        "forerun trace summarize bench.parquet --plot survival.svg",
        "forerun trace summarize trace.jsonl --json | jq .overall.acceptance_length",
    ),
)
