"""Expected step times: cost tables read once per operating point, with corrections."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol, runtime_checkable

from forerun.control.base import USUAL_WIDTH
from forerun.control.config import (
    CONTEXT_BUCKET,
    LARGEST_LOG_SURPRISE,
    STEP_TIME_MEMORY,
    STEP_TIME_STRENGTH,
)
from forerun.theory.cost import CostTable

__all__ = ["CostCell", "CostSource", "StepTimes", "Tables", "TimeCorrection", "TimeFactor"]


@runtime_checkable
class CostSource(Protocol):
    """Provides the cost tables of one drafter, by temperature."""

    def at(self, temperature: float) -> CostTable:
        """Return the cost table for a temperature."""


class CostCell(NamedTuple):
    """Key of an operating point in cost tables: batch size and context range.

    Attributes:
        batch: sequences in the step.
        bucket: their mean context over `CONTEXT_BUCKET`, rounded down.
    """

    batch: int
    bucket: int

    @classmethod
    def of(cls, batch: int, mean_context: float) -> CostCell:
        """Return the key for a batch size and its mean context."""
        return cls(batch, int(mean_context) // CONTEXT_BUCKET)

    @property
    def context(self) -> int:
        """Middle of the context range, in tokens."""
        return self.bucket * CONTEXT_BUCKET + CONTEXT_BUCKET // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds from a cost table at one batch size and context.

    Attributes:
        plain_s: a plain step.
        overhead_s: what a cycle takes beyond drafting and the pass, by levels drafted: 0, 1, 2, ...
        overhead_deltas_s: by how much each but the first is above the one before.
        verify_s: the target pass over the batch with 0, 1, 2, ... drafted nodes in all.
        least_row_s: the least that one more drafted node adds to it.
        least_level_s: the least that one more level adds to the overhead; below 0 where it falls.
        draft_s: one more drafted level, by how many sequences go on: entry b of b + 1 sequences.
        draft_deltas_s: by how much each entry of draft_s is above the one before.
    """

    plain_s: float
    overhead_s: tuple[float, ...]
    overhead_deltas_s: tuple[float, ...]
    verify_s: tuple[float, ...]
    least_row_s: float
    least_level_s: float
    draft_s: tuple[float, ...]
    draft_deltas_s: tuple[float, ...]

    @classmethod
    def read(cls, table: CostTable, place: CostCell, max_k: int, max_nodes: int = 0) -> StepTimes:
        """Read the table at an operating point for up to `max_k` levels and `max_nodes` nodes."""
        batch, context = place.batch, place.context
        # More sequences never take less, whatever noise there was between measured batches.
        by_batch = (table.draft_token_s(context, b + 1) for b in range(batch))
        draft_s = tuple(accumulate(by_batch, max))
        plain_s = table.plain_step_s(context, batch)
        most = max(max_k, max_nodes)
        by_rows = [table.verify_step_s(n + 1, context, batch) for n in range(most + 1)]
        verify_s = spread(by_rows, batch)
        overhead_s = (0.0, *(table.overhead_s(k + 1, context, batch) for k in range(max_k)))
        overhead_deltas_s = tuple(b - a for a, b in pairwise(overhead_s))
        return cls(
            plain_s=plain_s,
            overhead_s=overhead_s,
            overhead_deltas_s=overhead_deltas_s,
            verify_s=verify_s,
            least_row_s=max(0.0, min((b - a for a, b in pairwise(verify_s)), default=0.0)),
            least_level_s=min(overhead_deltas_s, default=0.0),
            draft_s=draft_s,
            draft_deltas_s=tuple(b - a for a, b in pairwise((0.0, *draft_s))),
        )

    @classmethod
    def learned(
        cls,
        *,
        plain_s: float,
        by_rows_s: Sequence[float],
        level_s: float,
        overhead_s: float,
        batch: int,
    ) -> StepTimes:
        """Create step times in which each drafted level costs the same at every batch size.

        Args:
            plain_s: a plain step.
            by_rows_s: the target pass by drafted rows per sequence: 0, 1, 2, ...
            level_s: one drafted level.
            overhead_s: the rest of a speculative step.
            batch: sequences in the step.
        """
        max_k = len(by_rows_s) - 1
        verify_s = spread(by_rows_s, batch)
        return cls(
            plain_s=plain_s,
            overhead_s=(0.0, *(overhead_s,) * max_k),
            overhead_deltas_s=(overhead_s, *(0.0,) * (max_k - 1)) if max_k else (),
            verify_s=verify_s,
            least_row_s=max(0.0, min((b - a for a, b in pairwise(verify_s)), default=0.0)),
            least_level_s=0.0,
            draft_s=(level_s,) * batch,
            draft_deltas_s=(level_s, *(0.0,) * (batch - 1)),
        )

    def tree_s(self, depth: int, batch: int) -> float:
        """Return the seconds of a step with trees beyond the target pass: drafting and overhead.

        A level below the first has several rows per sequence. What they cost the drafter is taken
        to be what they cost the target, in proportion.
        """
        rows = min(len(self.verify_s) - 1, (USUAL_WIDTH - 1) * batch)
        wide = self.verify_s[rows] / self.verify_s[0]
        return self.draft_s[batch - 1] * (1.0 + (depth - 1) * wide) + self.overhead_s[depth]

    def verify_nodes_s(self, num_nodes: float) -> float:
        """Return the seconds of a pass with `num_nodes` drafted nodes, interpolated linearly."""
        below = int(num_nodes)
        share = num_nodes - below
        if share == 0.0:
            return self.verify_s[below]
        return self.verify_s[below] + share * (self.verify_s[below + 1] - self.verify_s[below])


class Tables:
    """Step times by method, temperature and operating point, read once from cost tables.

    Args:
        costs: of every method that may be planned.
        max_k: largest K that may be planned.
        max_nodes: most nodes of a tree that may be planned; the largest K where that is more.
    """

    def __init__(self, costs: Mapping[str, CostSource], max_k: int, max_nodes: int = 0) -> None:
        self.costs = costs
        self.max_k = max_k
        self.max_nodes = max_nodes
        self._read: dict[tuple[str, bool, CostCell], StepTimes] = {}

    def at(self, method: str, place: CostCell, *, greedy: bool) -> StepTimes:
        """Return the step times of a method at an operating point."""
        key = (method, greedy, place)
        times = self._read.get(key)
        if times is None:
            table = self.costs[method].at(0.0 if greedy else 1.0)
            times = self._read[key] = StepTimes.read(table, place, self.max_k, self.max_nodes)
        return times


class TimeFactor:
    """Ratio of measured to expected time, updated at each step."""

    __slots__ = ("count", "log")

    def __init__(self) -> None:
        self.log = self.count = 0.0

    def observe(self, measured_s: float, expected_s: float) -> None:
        """Update the ratio from one step; outliers have a small weight."""
        believed = self.log / (self.count + STEP_TIME_STRENGTH)
        surprise = math.log(measured_s / expected_s) - believed
        surprise = believed + max(-LARGEST_LOG_SURPRISE, min(LARGEST_LOG_SURPRISE, surprise))
        self.log = self.log * STEP_TIME_MEMORY + surprise
        self.count = self.count * STEP_TIME_MEMORY + 1.0

    def value(self, prior: float = 0.0) -> float:
        """Return the ratio, shrunk towards exp(prior) while few steps were seen."""
        return math.exp((self.log + STEP_TIME_STRENGTH * prior) / (self.count + STEP_TIME_STRENGTH))


class TimeCorrection:
    """Ratios of measured to expected step times, by part of a step.

    Plain steps, the target's passes over drafted nodes, and what every drafter's steps take besides
    are corrected apart, but what is known of plain steps and of speculative ones without drafting
    is believed of all until they have been seen: a machine that is slow today is slow at all. The
    engine counts the beginning of a draft as drafting and the table as overhead, so the two are one
    where a drafter is corrected.

    Attributes:
        plain: of plain steps.
        rests: of speculative steps without drafting.
        passes: of target passes over drafted nodes.
        drafts: of all else in a speculative step, by method.
        trees: the same of steps with trees.
    """

    def __init__(self) -> None:
        self.plain = TimeFactor()
        self.rests = TimeFactor()
        self.passes = TimeFactor()
        self.drafts: defaultdict[str, TimeFactor] = defaultdict(TimeFactor)
        self.trees: defaultdict[str, TimeFactor] = defaultdict(TimeFactor)

    @property
    def plain_factor(self) -> float:
        """Ratio for plain steps."""
        return self.plain.value(self._either)

    @property
    def pass_factor(self) -> float:
        """Ratio for target passes over drafted nodes."""
        return self.passes.value(self._either)

    def draft_factor(self, method: str) -> float:
        """Ratio for a speculative step of one drafter beyond the target pass."""
        return self.drafts[method].value(self._either)

    def tree_factor(self, method: str) -> float:
        """Ratio for trees as `draft_factor` for chains, which provides its prior."""
        drafts = self.drafts[method]
        return self.trees[method].value(math.log(drafts.value(self._either)))

    @property
    def _either(self) -> float:
        plain, rests = self.plain, self.rests
        return (plain.log + rests.log) / (plain.count + rests.count + STEP_TIME_STRENGTH)


def spread(by_rows: Sequence[float], batch: int) -> tuple[float, ...]:
    """Interpolate times by rows per sequence to times by drafted nodes of a batch."""
    steps = [(after - before) / batch for before, after in pairwise(by_rows)]
    inner = (
        before + step * n
        for before, step in zip(by_rows, steps, strict=False)
        for n in range(batch)
    )
    return (*inner, by_rows[-1])
