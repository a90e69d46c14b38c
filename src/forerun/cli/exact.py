"""`forerun exact`: enumerate the output distribution of every verifier."""

from __future__ import annotations

import json
from dataclasses import dataclass

from forerun.cli.command import Command
from forerun.cli.tables import SafeConsole
from forerun.errors import Range


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactOptions:
    """Options of `forerun exact`."""

    distributions: int = 500
    """Random pairs of target and draft distributions per verifier, besides the structured ones."""
    json: bool = False
    """Print one JSON object."""


def run(options: ExactOptions) -> int:
    """Run the enumeration; returns 1 if a verifier is not exact."""
    Range("--distributions", 1, integer=True).check(options.distributions)

    from forerun.doctor.exact.run import render, run_enumeration

    with SafeConsole(stderr=True).status("enumerating") as status:
        report = run_enumeration(
            options.distributions, 0, lambda name: status.update(f"enumerating {name}")
        )
    if options.json:
        print(json.dumps(report.to_dict()))
    else:
        SafeConsole().print(render(report))
    return 0 if report.ok else 1


COMMAND = Command(
    options=ExactOptions,
    run=run,
    description="Prove by enumeration that every verifier keeps the target's distribution. Exits\n"
    "with 1 if one does not.",
    examples=("forerun exact", "forerun exact --distributions 2000 --json"),
)
