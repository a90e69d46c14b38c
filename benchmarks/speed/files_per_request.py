"""Counts the source files that run between `generate` and the text of one request.

A reader who follows a request through the code has to open as many. Loading is not counted, and
neither is a first request, which builds what later requests use again. A controller runs further
files, and drafts only where that pays, so K is fixed unless one is named:

    python benchmarks/speed/files_per_request.py --target zoo:code-11m --draft zoo:code-2m
    python benchmarks/speed/files_per_request.py --controller auto
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import forerun

PACKAGE = Path(forerun.__file__).parent
PROMPT = "def add(first, second):\n"


@contextmanager
def files_run() -> Iterator[set[str]]:
    """Collects the files whose functions are entered on this thread inside the block."""
    files: set[str] = set()

    def enter(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    sys.setprofile(enter)
    try:
        yield files
    finally:
        sys.setprofile(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="zoo:code-11m")
    parser.add_argument("--draft", default="zoo:code-2m")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--controller", choices=("fixed", "auto"), default="fixed")
    arguments = parser.parse_args()
    params = forerun.SamplingParams(max_tokens=32, temperature=arguments.temperature)
    config = forerun.EngineConfig(controller=arguments.controller)
    engine = forerun.Engine.load(arguments.target, draft=arguments.draft, config=config)
    engine.generate([PROMPT], params)
    with files_run() as files:
        engine.generate([PROMPT], params)
    names = sorted(
        Path(name).relative_to(PACKAGE).as_posix()
        for name in files
        if name.startswith(str(PACKAGE))
    )
    print(*names, sep="\n")
    print(f"{len(names)} files")


if __name__ == "__main__":
    main()
