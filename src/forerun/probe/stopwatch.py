"""Seconds of work on a device, waited for before and after."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Stopwatch", "synchronise"]


class Stopwatch:
    """Times work on one device.

    Args:
        clock: seconds, for example `time.perf_counter`.
        device: what is waited for, so that work queued before or left over is charged where it
            belongs.
    """

    def __init__(self, clock: Callable[[], float], device: torch.device) -> None:
        self.clock = clock
        self.device = device

    def now_s(self) -> float:
        """The clock, once the device has nothing left to do."""
        synchronise(self.device)
        return self.clock()

    def seconds(self, work: Callable[[], object]) -> float:
        """How long it takes, device work included."""
        start_s = self.now_s()
        work()
        return self.now_s() - start_s


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all that was queued; a CPU never has a queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
