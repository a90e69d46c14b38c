"""Arms whose server is `fake_server.py`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from forerun.tune.arms import Arm
from forerun.tune.process import free_ports

FAKE = Path(__file__).with_name("fake_server.py")
LONG_S = 120.0
"""More than anything here takes on a busy machine."""
PORTS = free_ports()


def fake_words(*options: object, faults: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the command of a fake server without its port."""
    words = [sys.executable, "-S", FAKE, *options]
    for fault in faults:
        words += ["--fault", fault]
    return tuple(map(str, words))


def fake_arm(*faults: str, name: str = "fake", options: tuple[object, ...] = ()) -> Arm:
    """Return an arm whose server has some faults, on a free port."""
    port = next(PORTS)
    return Arm(
        name=name,
        url=f"http://127.0.0.1:{port}/v1",
        command=fake_words("--port", port, *options, faults=faults),
    )


def wait_until(condition: Callable[[], object], timeout_s: float = LONG_S) -> None:
    """Wait for a condition; fail after a long time."""
    ends_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_s, "it did not happen"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        os.kill(pid, 0)
        return b") Z" not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
