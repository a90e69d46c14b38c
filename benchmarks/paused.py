"""Processes that wait while another one is measured, and the interval of a mean ratio."""

from __future__ import annotations

import json
import math
import os
import random  # noqa: TID251  # bootstrap of measured figures, seeded
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class PausedProcess:
    """A script's `--worker` over one source tree; it is stopped between its measurements.

    The worker prints "ready", and then answers every line of JSON with one number.

    Args:
        script: with the flag `--worker`, whose value is a JSON object.
        tree: checkout whose `src` it imports.
        job: value of the flag.
    """

    def __init__(self, script: str, tree: Path, job: Mapping[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, script, "--worker", json.dumps(job)],
            env=os.environ | {"PYTHONPATH": str(tree / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        while (line := self.process.stdout.readline().strip()) != "ready":
            if not line and self.process.poll() is not None:
                raise SystemExit(f"the process over {tree} ended")
        self.process.send_signal(signal.SIGSTOP)

    def tokens_per_s(self, *request: object) -> float:
        """Let the process go on for one measurement."""
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        found = float(json.loads(self.process.stdout.readline()))
        self.process.send_signal(signal.SIGSTOP)
        return found


def mean_ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean of paired ratios with the ends of its bootstrap interval (95%)."""
    logs = [math.log(a / b) for a, b in zip(above, below, strict=True)]
    rng = random.Random(0)
    means = sorted(statistics.fmean(rng.choices(logs, k=len(logs))) for _ in range(4000))
    return math.exp(statistics.fmean(logs)), math.exp(means[100]), math.exp(means[3899])
