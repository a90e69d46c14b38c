"""Finds tests that depend on the clock or on what else the machine does: `make repeat`.

Runs every test file many times beside two busy processes, and once with a clock that is ten times
slower. A test that fails in one of those runs decides something by time.

    python -m tests.repeat [--times 20] [PATH ...]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

NUM_BUSY = 2
SLOW_CLOCK = {"FORERUN_CLOCK_SCALE": "0.1"}
NOTHING_RAN = 5
"""Exit status of pytest where no test was collected."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@contextlib.contextmanager
def busy_processes(number: int = NUM_BUSY) -> Iterator[None]:
    """Keep as many processes computing while the block runs."""
    processes = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def failed_tests(path: Path, changes: Mapping[str, str] = {}) -> list[str]:
    """Run one test file and return the tests that failed; its own name if it did not run."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **changes})
    if run.returncode in (0, NOTHING_RAN):
        return []
    return FAILED.findall(run.stdout) or [f"{path} (exit status {run.returncode})"]


def test_files(paths: list[Path]) -> list[Path]:
    """Return the test files among the paths and below them."""
    inside = [sorted(path.rglob("test_*.py")) if path.is_dir() else [path] for path in paths]
    return [path for files in inside for path in files]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, default=[Path("tests")])
    parser.add_argument("--times", type=int, default=20, help="runs of each file beside busy loops")
    arguments = parser.parse_args()
    failures = Counter[str]()
    for path in test_files(arguments.paths):
        with busy_processes():
            runs = [failed_tests(path) for _ in range(arguments.times)]
        runs.append(failed_tests(path, SLOW_CLOCK))
        failures.update(test for failed in runs for test in failed)
        print(f"{path}: {sum(map(bool, runs))} of {len(runs)} runs failed", flush=True)
    for test, number in failures.most_common():
        print(f"{test}: failed in {number} of {arguments.times + 1} runs")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
