"""Cost model of a controller without a profile, estimated from the durations of steps.

Source of the model: the cost line of `theory.cost`, kappa = K c + v(K + 1) + o. v is linear in rows
at first, and bends where passes of so many rows were measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate

from forerun.control.allocation import Pricing
from forerun.control.base import RequestState
from forerun.control.config import (
    ASSUMED_LEVEL,
    ASSUMED_ROW,
    COST_MEMORY,
    FIRST_DEPTH,
    LARGEST_RATIO,
    LINE_STRENGTH,
)
from forerun.control.step_times import StepTimes, TimeFactor
from forerun.theory.record import StepRecord

__all__ = ["LearnedCosts"]


class MeasuredMean:
    """A discounted mean of durations that limits the influence of single outliers."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.count = self.total = 0.0

    @property
    def mean(self) -> float:
        """The mean in seconds; it needs at least one observed duration."""
        return self.total / self.count

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        if self.count and 0.0 < seconds < self.mean / LARGEST_RATIO:
            self.count = self.total = 0.0  # what was measured before had been interrupted
        elif self.count and self.mean > 0.0:
            seconds = min(seconds, self.mean * LARGEST_RATIO)
        self.count = self.count * COST_MEMORY + 1.0
        self.total = self.total * COST_MEMORY + seconds


class BatchCosts:
    """Durations measured at one batch size.

    Attributes:
        plain_s: whole plain steps.
        pass_s: target passes over drafted nodes.
        num_nodes: drafted nodes of those passes.
        by_rows_s: the same passes by drafted rows per sequence, rounded.
        level_s: one drafted level, by method.
        other_s: the rest of a speculative step, by method.
        deepest: the deepest draft so far, by method.
        trees: measured over expected time of drafting trees, by method.
    """

    def __init__(self) -> None:
        self.plain_s = MeasuredMean()
        self.pass_s = MeasuredMean()
        self.num_nodes = MeasuredMean()
        self.by_rows_s: dict[int, MeasuredMean] = {}
        self.level_s: dict[str, MeasuredMean] = {}
        self.other_s: dict[str, MeasuredMean] = {}
        self.deepest: dict[str, int] = {}
        self.trees: defaultdict[str, TimeFactor] = defaultdict(TimeFactor)


class LearnedCosts:
    """Step times by batch size, from plain steps and from speculative ones.

    Until a plain step was measured, a target pass is taken to cost as much as a plain step but for
    its drafted rows. Until a batch size was measured, it is taken to cost what the nearest measured
    one does.

    Args:
        methods: names of the drafters.
        max_k: largest K.
        max_tree_nodes: most nodes of a tree; the largest K where that is more.
    """

    def __init__(self, methods: Sequence[str], max_k: int, max_tree_nodes: int = 0) -> None:
        self.methods = tuple(methods)
        self.max_k = max_k
        self.max_nodes = max(max_k, max_tree_nodes)
        self._batches: dict[int, BatchCosts] = {}
        self._num_states = 0

    def pricing(self, states: Sequence[RequestState]) -> Pricing:
        """Return the expected durations of a step with these requests."""
        batch = self._num_states = len(states)
        costs = self._nearest(batch)
        return Pricing(
            {method: self._times(costs, method, batch) for method in self.methods},
            tree_factors={
                method: factor.value() for method, factor in (costs.trees if costs else {}).items()
            },
        )

    def largest_depth(self, method: str, batch: int) -> int:
        """Return the largest K that may be planned, not far beyond the K that were measured."""
        costs = self._nearest(batch)
        deepest = 0 if costs is None else costs.deepest.get(method, 0)
        return min(self.max_k, max(FIRST_DEPTH, deepest + 1))

    def largest_tree(self, batch: int) -> int:
        """Return the largest tree that may be planned, about twice as large as those measured."""
        costs = self._nearest(batch)
        most = 0 if costs is None else max(costs.by_rows_s, default=0)
        return min(self.max_nodes, max(FIRST_DEPTH, 2 * most + 1))

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Update the costs from one step without prompts."""
        first, batch = records[0], len(records)
        total_s = first.draft_s + first.verify_s + first.other_s
        if batch != self._num_states or total_s <= 0.0:
            return
        costs = self._batches.setdefault(batch, BatchCosts())
        drafted = [record for record in records if record.num_drafted]
        if not drafted:
            costs.plain_s.observe(total_s)
            return
        costs.pass_s.observe(first.verify_s)
        num_nodes = sum(record.num_drafted for record in drafted)
        costs.num_nodes.observe(float(num_nodes))
        rows = round(num_nodes / batch)
        costs.by_rows_s.setdefault(rows, MeasuredMean()).observe(first.verify_s)
        methods = {record.method for record in drafted}
        if len(methods) > 1:
            return  # the times of drafting cannot be told apart
        (method,) = methods
        depth = max(record.depth_drafted for record in drafted)
        if any(record.path_children is not None for record in drafted):
            own_s = self._times(costs, method, batch).tree_s(min(depth, self.max_k), batch)
            if first.draft_s + first.other_s > 0.0 and own_s > 0.0:
                costs.trees[method].observe(first.draft_s + first.other_s, own_s)
            return
        costs.level_s.setdefault(method, MeasuredMean()).observe(first.draft_s / max(1, depth))
        costs.other_s.setdefault(method, MeasuredMean()).observe(first.other_s)
        costs.deepest[method] = max(costs.deepest.get(method, 0), depth)

    def _nearest(self, batch: int) -> BatchCosts | None:
        if not self._batches:
            return None
        return self._batches[min(self._batches, key=lambda known: abs(known - batch))]

    def _times(self, costs: BatchCosts | None, method: str, batch: int) -> StepTimes:
        """Return step times that are linear in rows and levels."""
        plain_s, row_s = 1.0, ASSUMED_ROW
        level_s, other_s = None, 0.0
        if costs is not None:
            plain_s, row_s = plain_and_row_s(costs)
            if method in costs.level_s:
                level_s, other_s = costs.level_s[method].mean, costs.other_s[method].mean
        if level_s is None:
            level_s = ASSUMED_LEVEL * plain_s
        by_rows_s = [plain_s + row_s * rows * batch for rows in range(self.max_nodes + 1)]
        if costs is not None:
            by_rows_s = bent(by_rows_s, costs.by_rows_s)
        return StepTimes.learned(
            plain_s=plain_s, by_rows_s=by_rows_s, level_s=level_s, overhead_s=other_s, batch=batch
        )


def plain_and_row_s(costs: BatchCosts) -> tuple[float, float]:
    """Return the seconds of a plain step, and the additional seconds of a pass per drafted node."""
    if not costs.pass_s.count:
        plain_s = costs.plain_s.mean
        return plain_s, ASSUMED_ROW * plain_s
    pass_s, num_nodes = costs.pass_s.mean, costs.num_nodes.mean
    if not costs.plain_s.count:
        plain_s = pass_s / (1.0 + ASSUMED_ROW * num_nodes)
        return plain_s, ASSUMED_ROW * plain_s
    plain_s = costs.plain_s.mean
    return plain_s, max(0.0, pass_s - plain_s) / num_nodes


def bent(line_s: Sequence[float], measured: Mapping[int, MeasuredMean]) -> list[float]:
    """Correct a linear estimate of pass times at the sizes that were measured.

    Beyond the most rows that were measured, passes lie above the line by as much as those did.

    Args:
        line_s: pass times by drafted rows per sequence: 0, 1, 2, ...
        measured: passes by the same.
    """
    found, most, above_s = list(line_s), 0, 0.0
    for rows, mean in sorted(measured.items()):
        if 0 < rows < len(found):
            weight = mean.count / (mean.count + LINE_STRENGTH)
            found[rows] += weight * (mean.mean - found[rows])
            most, above_s = rows, max(0.0, found[rows] - line_s[rows])
    found[most + 1 :] = [seconds + above_s for seconds in found[most + 1 :]]
    return list(accumulate(found, max))
