"""`forerun exact`: enumerate the output law of every verifier, and catch planted bugs."""

from __future__ import annotations

import json
from dataclasses import dataclass

from forerun.cli.command import Command
from forerun.errors import InvalidRequest

__all__ = ["COMMAND", "ExactOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactOptions:
    """Options of `forerun exact`."""

    laws: int = 500
    """Random pairs of target and draft laws per verifier, besides the structured ones."""
    seed: int = 0
    """Decides the random laws."""
    json: bool = False
    """Print one JSON object."""


def run(options: ExactOptions) -> int:
    """Enumerate; returns 1 where a verifier is not exact or a planted bug is missed, else 0."""
    if options.laws < 1:
        raise InvalidRequest(f"--laws is {options.laws}; it must be at least 1")

    from rich.console import Console

    from forerun.testing.exact.report import render
    from forerun.testing.exact.run import run_enumeration

    with Console(stderr=True).status("enumerating") as status:
        report = run_enumeration(
            options.laws, options.seed, lambda name: status.update(f"enumerating {name}")
        )
    if options.json:
        print(json.dumps(report.to_dict()))
    else:
        Console().print(render(report))
    return 0 if report.ok else 1


COMMAND = Command(
    options=ExactOptions,
    run=run,
    description="Prove by enumeration that every verifier keeps the target's law, and show that\n"
    "planted bugs are caught. Exits with 1 if either fails.",
    examples=("forerun exact", "forerun exact --laws 2000 --seed 7 --json"),
)
