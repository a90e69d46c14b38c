"""Times work on a device, and measures the read rate of the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from forerun.models.base import LanguageModel, RowBatch, SampledChains
from forerun.models.memory import available_bytes
from forerun.models.wrapped import ObservedModel, ObservedSampler

__all__ = ["Bandwidth", "Stopwatch", "TimedModel", "read_bandwidth", "synchronise", "timed"]


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
        """Return the time once the device has finished all queued work."""
        synchronise(self.device)
        return self.clock()

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds that a function takes, device work included."""
        start_s = self.now_s()
        work()
        return self.now_s() - start_s


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished all queued work; without effect on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class TimedModel(ObservedModel):
    """LanguageModel wrapper that measures the time of its passes.

    Args:
        model: what does the work.
        stopwatch: of the model's device. It waits for the device at both ends of a pass, so work of
            the caller that would have overlapped with one no longer does.

    Attributes:
        inside_s: seconds spent in passes so far.
    """

    def __init__(self, model: LanguageModel, stopwatch: Stopwatch) -> None:
        super().__init__(model)
        self.stopwatch = stopwatch
        self.inside_s = 0.0

    def begin(self) -> float:
        """Return the time at the start of a pass."""
        return self.stopwatch.now_s()

    def end(self, begun: float, batch: RowBatch, num_passes: int) -> None:
        """Add the seconds of a pass."""
        self.inside_s += self.stopwatch.now_s() - begun


class TimedSampledModel(ObservedSampler, TimedModel):
    """LanguageModel wrapper with timing, for models that sample whole chains."""


def timed(model: LanguageModel, stopwatch: Stopwatch) -> TimedModel:
    """Wrap a model so that its passes are timed."""
    kind = TimedSampledModel if isinstance(model, SampledChains) else TimedModel
    return kind(model, stopwatch)


NUM_PASSES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Memory read rate, with the buffer size and threads of its measurement.

    Attributes:
        buffer_bytes: size of the buffer; one that fits into a cache is read at the cache's rate,
            and so are weights of that size.
        bytes_per_s: the best of all passes.
    """

    buffer_bytes: int
    bytes_per_s: float


def read_bandwidth(num_bytes: int, stopwatch: Stopwatch, num_threads: int) -> Bandwidth:
    """Read a buffer repeatedly with the threads of the passes, and return the best rate.

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
    """Set the number of torch's threads during the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
