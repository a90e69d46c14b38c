"""Trains a draft with `forerun align` in a process of its own, which ends when this one does."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from forerun.tune import supervisor
from forerun.tune.process import explain_report, read_tail

GRACE_S = 10.0
POLL_S = 0.25


def align_command(
    target: str, draft: str, method: str, texts: Path, out: Path, extra: Sequence[str]
) -> list[str]:
    """Return the command that aligns a draft; repeated, it goes on where it was interrupted."""
    fixed = ("--target", target, "--draft", draft, "--method", method)
    data = ("--prompts", str(texts), "--fixed-share", "1.0", "--out", str(out))
    program = (sys.executable, "-m", "forerun", "align")
    return [*program, *fixed, *data, *extra]


def run_training(
    command: Sequence[str], log: Path, limit_s: float, is_stopped: Callable[[], bool]
) -> str | None:
    """Run a command; returns why it did not succeed, None if it did.

    It is ended after `limit_s` seconds, when `is_stopped` says so, and when this process ends in
    whatever way.
    """
    program = [sys.executable, "-I", "-S", supervisor.__file__, str(log), str(GRACE_S)]
    with subprocess.Popen(
        [*program, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches this process alone
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        ends_s = time.monotonic() + limit_s
        while process.poll() is None and time.monotonic() < ends_s and not is_stopped():
            time.sleep(POLL_S)
        is_late = process.poll() is None
        process.stdin.close()  # a supervisor that still runs ends its command
        process.wait()
        report = process.stdout.readline()
    if is_late:
        return "it was stopped" if is_stopped() else f"it took longer than {limit_s / 60:g} minutes"
    return None if report.strip() == b"0" else explain_report(report, read_tail(log))
