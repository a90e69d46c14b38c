"""Measures all cells in interleaved rounds until medians are stable or the time is over.

A machine's speed drifts by more than the difference between two cells. So no cell is measured
alone: a round visits all of them, in an order that rotates, and what a round did to all its cells
(its drift) is divided out before medians are taken.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Protocol, TypeVar, runtime_checkable

import torch

from forerun.errors import NotEnoughMemory
from forerun.measure.profile.config import ProfileCell, ProfileConfig, Quantity, without
from forerun.models.base import (
    DraftsInOneCall,
    LanguageModel,
    ObservedModel,
    ObservedSampler,
    RowBatch,
)
from forerun.models.memory import available_bytes
from forerun.theory.intervals import Interval, median_interval


class Stopwatch:
    """Times work on one device; waits for the device, so that queued work is not missed."""

    def __init__(self, clock: Callable[[], float], device: torch.device) -> None:
        self.clock = clock
        self.device = device

    def now_s(self) -> float:
        """Return the time once the device has finished all queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()
        return self.clock()

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds that a function takes, device work included."""
        start_s = self.now_s()
        work()
        return self.now_s() - start_s


class TimedModel(ObservedModel):
    """LanguageModel wrapper that adds up the seconds of its passes in `inside_s`.

    It waits for the device at both ends of a pass, so work of the caller that would have overlapped
    with one no longer does.
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
    kind = TimedSampledModel if isinstance(model, DraftsInOneCall) else TimedModel
    return kind(model, stopwatch)


NUM_PASSES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Memory read rate, with the buffer size and threads of its measurement.

    Attributes:
        buffer_bytes: size of the buffer; one that fits into a cache is read at the cache's rate,
            and so are weights of that size.
    """

    buffer_bytes: int
    bytes_per_s: float


def read_bandwidth(num_bytes: int, stopwatch: Stopwatch, num_threads: int) -> Bandwidth:
    """Read a buffer repeatedly with the threads of the passes, and return the best rate.

    Two reductions of 64-bit integers compete, because which of them keeps up with the memory
    depends on the device.
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
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


logger = logging.getLogger("forerun.probe")

LEAST_SAMPLES = 6
"""Of fewer values not even the whole range holds the median with 95%."""

T = TypeVar("T")

Samples = Mapping[ProfileCell, Sequence[Sequence[float]]]
"""Seconds per cell and round; a visit may yield several, and not every round visits every cell."""


@runtime_checkable
class Rig(Protocol):
    """Interface of measurements of several cells with the same models and sequences."""

    @property
    def cells(self) -> Sequence[ProfileCell]:
        """Return the cells that the rig can measure."""

    @property
    def rounds_per_visit(self) -> int:
        """Return n: cells are visited in every n-th round, with n above 1 where a visit is slow."""

    def ready(self) -> AbstractContextManager[None]:
        """Prepare models and sequences for the measurements in the block."""

    def visit(self, cell: ProfileCell) -> Mapping[ProfileCell, Sequence[float]]:
        """Measure a cell once in a `ready` block; returns seconds by cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Samples of all rounds, and the cells that were left out."""

    samples: Samples
    left_out: tuple[ProfileCell, ...]
    stable: bool


def measure(
    rigs: Sequence[Rig],
    config: ProfileConfig,
    clock: Callable[[], float],
    notify: Callable[[int, float], None],
) -> Rounds:
    """Measure all cells of a profile in rounds, until their medians are stable or time runs out."""
    asked = [cell for rig in rigs for cell in rig.cells]
    # First times are slow; they also show what does not fit.
    samples: dict[ProfileCell, list[Sequence[float]]] = {
        cell: [] for cell in one_round(rigs, asked, num_rounds=0)
    }
    started_s, longest_s = clock(), 0.0
    num_rounds, error = 0, math.inf
    while num_rounds < config.min_rounds or (
        error > config.target_error and clock() - started_s + longest_s <= config.budget_s
    ):
        round_started_s = clock()
        found = one_round(rigs, samples, num_rounds)
        longest_s = max(longest_s, clock() - round_started_s)
        num_rounds += 1
        samples = {cell: [*samples[cell], seconds] for cell, seconds in found.items()}
        error = widest(samples)
        notify(num_rounds, error)
    left_out = tuple(cell for cell in asked if cell not in samples)
    if left_out:
        logger.warning(
            "%d of %d measurements do not fit into memory and were left out; the first is the %s",
            len(left_out),
            len(asked),
            left_out[0],
        )
    return Rounds(samples=samples, left_out=left_out, stable=error <= config.target_error)


def one_round(
    rigs: Sequence[Rig], cells: Collection[ProfileCell], num_rounds: int
) -> dict[ProfileCell, Sequence[float]]:
    left = set(cells)
    found: dict[ProfileCell, Sequence[float]] = {cell: () for cell in cells}
    due = [rig for rig in rigs if num_rounds % rig.rounds_per_visit == 0]
    for rig in rotated(due, num_rounds):
        with rig.ready():
            for cell in rotated(rig.cells, num_rounds):
                if cell not in left or found[cell]:
                    continue
                try:
                    for visited, seconds in rig.visit(cell).items():
                        found[visited] = (*found[visited], *seconds)
                except Exception as error:
                    if not _is_out_of_memory(error):
                        raise
                    left = fitting(left, cell, error)
    return {cell: seconds for cell, seconds in found.items() if cell in left}


def fitting(
    cells: Collection[ProfileCell], failed: ProfileCell, error: Exception
) -> set[ProfileCell]:
    """Return the cells that remain after one ran out of memory."""
    left = set(without(cells, failed))
    if not left:
        raise NotEnoughMemory(f"{failed} does not fit into memory: {error}") from error
    return left


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, NotEnoughMemory | MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def rotated(items: Sequence[T], shift: int) -> Iterator[T]:
    start = shift % len(items) if items else 0
    yield from items[start:]
    yield from items[:start]


def corrected(samples: Samples) -> dict[ProfileCell, list[float]]:
    """Samples divided by the machine's relative speed in their round (Tukey 1977)."""
    middles = {cell: median(s for v in visits for s in v) for cell, visits in samples.items()}
    drift = []
    for i in range(max(map(len, samples.values()))):
        relative = [median(samples[c][i]) / s for c, s in middles.items() if s and samples[c][i]]
        drift.append(median(relative) if relative else 1.0)
    return {
        cell: [s / drift[i] for i, visit in enumerate(visits) for s in visit]
        for cell, visits in samples.items()
    }


def estimates(samples: Samples) -> dict[ProfileCell, Interval]:
    return {cell: median_interval(seconds) for cell, seconds in corrected(samples).items()}


def widest(samples: Samples) -> float:
    """Return half of the widest interval, relative to its estimate.

    For overheads and drafts smaller than a plain target pass it is a share of that pass, because a
    relative error of a small part hardly changes the time of a step. Infinite while there are too
    few samples for an interval of 95%.
    """
    if min(sum(map(len, visits)) for visits in samples.values()) < LEAST_SAMPLES:
        return math.inf
    found = estimates(samples)
    plain_s = {
        (cell.batch, cell.context): interval.estimate
        for cell, interval in found.items()
        if cell.quantity is Quantity.TARGET_PASS and cell.size == 1
    }
    floor_s = {batch: min(s for (b, _), s in plain_s.items() if b == batch) for batch, _ in plain_s}
    return max(
        (interval.high - interval.low) / 2 / max(interval.estimate, floor_s.get(cell.batch, 0.0))
        for cell, interval in found.items()
        if interval.high > 0
    )
