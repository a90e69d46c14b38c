"""How fast this machine reads: no pass can be faster than its bytes at that rate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from forerun.models.memory import available_bytes
from forerun.probe.stopwatch import Stopwatch

__all__ = ["Bandwidth", "read_bandwidth"]

NUM_PASSES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """A read rate and what it was measured over.

    Attributes:
        buffer_bytes: size of the buffer; one that fits into a cache is read at the cache's rate,
            and so are weights of that size.
        bytes_per_s: the best of all passes.
    """

    buffer_bytes: int
    bytes_per_s: float


def read_bandwidth(num_bytes: int, stopwatch: Stopwatch, num_threads: int) -> Bandwidth:
    """Read a buffer again and again, with as many threads as the passes, and keep the best time.

    Two reductions of 64-bit integers compete, because which of them keeps up with the memory
    depends on the device.

    Args:
        num_bytes: what a pass reads, so usually the size of the weights; cut to half of what is
            available.
        stopwatch: of the device.
        num_threads: threads that carry the passes; torch's number is as it was afterwards.
    """
    device = stopwatch.device
    num_bytes = min(num_bytes, available_bytes(device) // 2)
    buffer = torch.ones(max(1, num_bytes // 8), dtype=torch.int64, device=device)
    reads = (buffer.sum, buffer.amax)
    with torch_threads(num_threads):
        times_s = [stopwatch.seconds(read) for _ in range(NUM_PASSES) for read in reads]
    buffer_bytes = buffer.numel() * buffer.itemsize
    return Bandwidth(buffer_bytes=buffer_bytes, bytes_per_s=buffer_bytes / min(times_s))


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """So many threads for torch, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
