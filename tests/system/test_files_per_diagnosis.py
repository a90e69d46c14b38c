"""How many source files a reader opens who follows evidence through `forerun diagnose FILE`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import pytest
from tests.records import HEADER, REQUEST, plain, steps

import forerun
from forerun.cli.main import main
from forerun.trace.files import open_trace

PACKAGE = Path(forerun.__file__).parent
SHELL = ("cli/", "terminal_text.py")
"""What every command enters, whatever it does."""
LOG = (
    "SpecDecoding metrics: Mean acceptance length: 2.10, Accepted: 110 tokens, Drafted: 300 tokens,"
    " Per-position acceptance rate: 0.600, 0.300, 0.200, Avg Draft acceptance rate: 36.7%\n"
)


def files_entered(arguments: Sequence[str]) -> set[str]:
    """Return the files of the package whose functions a command enters, without its shell."""
    files: set[str] = set()

    def enter(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            files.add(frame.f_code.co_filename)

    main(arguments)  # what a first call builds is not counted
    gc.disable()  # nor are finalizers of what earlier tests left behind
    sys.setprofile(enter)
    try:
        main(arguments)
    finally:
        sys.setprofile(None)
        gc.enable()
    inside = {Path(file) for file in files if file.startswith(str(PACKAGE))}
    names = {path.relative_to(PACKAGE).as_posix() for path in inside}
    return {name for name in names if not name.startswith(SHELL)}


@pytest.mark.parametrize(("kind", "most"), [("log", 11), ("trace", 16)])
def test_evidence_enters_few_files(kind: str, most: int, tmp_path: Path) -> None:
    """The aim is ten; a ceiling is only lowered."""
    path = tmp_path / "evidence.jsonl"
    if kind == "log":
        path.write_text(LOG * 3)
    else:
        with open_trace(path) as writer:
            for record in (
                HEADER,
                *steps(60),
                *(plain(cycle_id=99 + i) for i in range(20)),
                REQUEST,
            ):
                writer.add(record)
    found = files_entered(["diagnose", str(path)])
    assert len(found) <= most, " ".join(sorted(found))
