"""Expected step times from cost tables, corrected by measured steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from forerun.control.allocation import Pricing
from forerun.control.base import RequestState
from forerun.control.step_times import CostCell, CostSource, StepTimes, Tables, TimeCorrection
from forerun.theory.record import StepRecord

__all__ = ["OperatingPoint", "ProfiledCosts"]


class OperatingPoint(NamedTuple):
    """Batch, context and cost tables at which a step is decided.

    Attributes:
        place: its batch and context.
        greedy: whether all its requests are.
        times: by method.
        correction: of those times.
    """

    place: CostCell
    greedy: bool
    times: dict[str, StepTimes]
    correction: TimeCorrection

    def pricing(self) -> Pricing:
        """Return the expected durations of steps at this operating point."""
        correction = self.correction
        return Pricing(
            self.times,
            correction.plain_factor,
            correction.pass_factor,
            {method: correction.draft_factor(method) for method in self.times},
            {method: correction.tree_factor(method) for method in self.times},
        )


class ProfiledCosts:
    """Expected step times from profiled cost tables, with corrections estimated per batch size.

    Args:
        costs: of every drafter that may be planned, by its method.
        max_k: largest K.
        max_tree_nodes: most nodes of a tree; the largest K where that is more.

    Attributes:
        methods: names of the drafters that have costs.
    """

    def __init__(
        self, costs: Mapping[str, CostSource], max_k: int, max_tree_nodes: int = 0
    ) -> None:
        self.max_nodes = max(max_k, max_tree_nodes)
        self.tables = Tables(costs, max_k, self.max_nodes)
        self.methods = tuple(costs)
        self.max_k = max_k
        self._corrections: dict[int, TimeCorrection] = {}
        self._last: OperatingPoint | None = None

    def pricing(self, states: Sequence[RequestState]) -> Pricing:
        """Return the expected durations of a step with these requests."""
        return self.at(states).pricing()

    def largest_depth(self, method: str, batch: int) -> int:
        """Return the largest K that may be planned."""
        return self.max_k

    def largest_tree(self, batch: int) -> int:
        """Return the most nodes of a tree that may be planned."""
        return self.max_nodes

    def at(self, states: Sequence[RequestState]) -> OperatingPoint:
        """Return the operating point of these requests; the previous one is reused if possible."""
        batch, context, greedy = len(states), 0, True
        for state in states:
            context += state.num_committed
            greedy = greedy and state.temperature == 0
        place = CostCell.of(batch, context / batch)
        point = self._last
        if point is None or point.place != place or point.greedy != greedy:
            correction = self._corrections.setdefault(batch, TimeCorrection())
            methods = self.tables.costs
            times = {method: self.tables.at(method, place, greedy=greedy) for method in methods}
            point = self._last = OperatingPoint(place, greedy, times, correction)
        return point

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Update the corrections with the measured duration of the last step."""
        point, first = self._last, records[0]
        rest_s = first.verify_s + first.other_s
        if point is None or len(records) != point.place.batch or rest_s <= 0.0:
            return
        trees = [r for r in records if r.num_drafted and r.path_children is not None]
        if trees:
            self._observe_trees(point, trees)
            return
        depths: dict[str, list[int]] = {}
        for record in records:
            if record.num_drafted and record.method in point.times:
                depths.setdefault(record.method, []).append(record.depth_drafted)
        correction = point.correction
        if not depths:
            plain_s = next(iter(point.times.values())).plain_s
            correction.plain.observe(rest_s, plain_s)
            return
        drafts_s, overheads_s, pass_s = expected_times(depths, point.times)
        correction.rests.observe(rest_s, pass_s + sum(overheads_s.values()))
        if first.verify_s > 0.0:
            correction.passes.observe(first.verify_s, pass_s)
        own_s = first.draft_s + first.other_s
        if len(depths) == 1 and own_s > 0.0:  # the times of two drafters cannot be told apart
            (method,) = depths
            expected_s = drafts_s[method] + overheads_s[method]
            if expected_s > 0.0:
                correction.drafts[method].observe(own_s, expected_s)

    def _observe_trees(self, point: OperatingPoint, trees: Sequence[StepRecord]) -> None:
        """Update the corrections with the measured duration of a step with trees."""
        first, (method, *others) = trees[0], {tree.method for tree in trees}
        if others or method not in point.times:
            return
        times, correction = point.times[method], point.correction
        num_nodes = sum(tree.num_drafted for tree in trees)
        depth = max(tree.depth_drafted for tree in trees)
        own_s = times.tree_s(depth, point.place.batch)
        pass_s = times.verify_nodes_s(min(num_nodes, len(times.verify_s) - 1))
        if first.verify_s > 0.0:
            correction.passes.observe(first.verify_s, pass_s)
        if first.draft_s + first.other_s > 0.0 and own_s > 0.0:
            correction.trees[method].observe(first.draft_s + first.other_s, own_s)


def expected_times(
    depths: Mapping[str, Sequence[int]], times: Mapping[str, StepTimes]
) -> tuple[dict[str, float], dict[str, float], float]:
    """Return the expected times of a speculative step according to the tables.

    Args:
        depths: levels drafted by every request that did, by method, at least one.
        times: by method.

    Returns:
        Seconds of drafting and of overhead by method, and of the target pass.
    """
    num_nodes = 0
    drafts_s, overheads_s = {}, {}
    for method, drafted in depths.items():
        by_count = times[method].draft_s
        if len(drafted) == 1:
            drafts_s[method] = drafted[0] * by_count[0]
        else:
            drafts_s[method] = sum(
                by_count[sum([depth > level for depth in drafted]) - 1]
                for level in range(max(drafted))
            )
        num_nodes += sum(drafted)
        overheads_s[method] = times[method].overhead_s[max(drafted)]
    return drafts_s, overheads_s, next(iter(times.values())).verify_nodes_s(num_nodes)
