"""Write the trace of one fault, to practise on: practice.py NAME --out FILE."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tests.lab.catalogue import FAULTS
from tests.lab.laboratory import Lab
from tests.lab.run import run_fault

__all__ = ["main"]


def main() -> None:
    """List what there is, or run one of it."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/faults/practice.py", description=__doc__
    )
    parser.add_argument("name", nargs="?", choices=FAULTS, help="left out: list all")
    parser.add_argument("--seed", type=int, default=0, help="decides prompts and sizes")
    parser.add_argument("--out", type=Path, default=Path("fault.jsonl"), help="trace to write")
    options = parser.parse_args()
    console = Console()
    if options.name is None:
        console.print(listed())
        return
    with tempfile.TemporaryDirectory() as folder:
        run = run_fault(FAULTS[options.name], options.seed, options.out, Lab(Path(folder)))
    said = "".join(f" --fact {name}={value:.4g}" for name, value in run.says.items())
    console.print(f"forerun diagnose {options.out}{said}", soft_wrap=True)


def listed() -> Table:
    """Every fault and what it is a case of."""
    table = Table("name", "label", "what is wrong")
    for fault in FAULTS.values():
        table.add_row(fault.name, fault.label, fault.what)
    return table


if __name__ == "__main__":
    main()
