"""Cost model of a controller: expected step times, corrected by the measured ones.

The proportions of the costs come from a profile where there is one, and are assumed otherwise. The
measured steps correct them part by part. Source of the model: the cost line of `theory.cost`,
kappa = K c + v(K + 1) + o.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

from forerun.control.base import USUAL_WIDTH, RequestState
from forerun.control.config import GoodputConfig
from forerun.theory.cost import CostTable
from forerun.theory.record import StepRecord

LEAST_READ = 16
"""Least number of tokens whose reading time is told from the time of a draft or a step."""


class Rest(NamedTuple):
    """Plain steps of which no records were made."""

    num_steps: int = 0
    seconds: float = 0.0


NO_REST = Rest()


@runtime_checkable
class CostSource(Protocol):
    """Provides the cost tables of one drafter, by temperature."""

    def at(self, temperature: float) -> CostTable:
        """Return the cost table for a temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterTraits:
    """Properties of a drafter that are known before it has drafted.

    Attributes:
        level_cost: cost of a drafted level in plain steps; None for the assumed one.
        reads_text: whether it processes the whole text of a request before the first draft.
    """

    level_cost: float | None = None
    reads_text: bool = False


class OperatingPoint(NamedTuple):
    """Batch, context and temperature at which a step is decided."""

    batch: int
    context_bits: int
    greedy: bool

    @classmethod
    def of(cls, states: Sequence[RequestState]) -> OperatingPoint:
        num_tokens, greedy = 0, True
        for state in states:
            num_tokens += state.num_committed
            greedy = greedy and state.temperature == 0
        return cls(len(states), (num_tokens // len(states)).bit_length(), greedy)

    @property
    def context(self) -> int:
        """Middle of the contexts with so many binary digits, in tokens."""
        return 3 * (1 << self.context_bits) // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of the parts of a step at one operating point.

    Attributes:
        verify_s: the target pass over the batch with 0, 1, 2, ... drafted nodes in all.
        draft_s: one drafted level, by how many sequences draft it: entry b of b + 1 sequences.
        overhead_s: what a step takes beyond drafting and the pass, by levels drafted: 0, 1, 2, ...
        tree_factor: by which drafting trees takes longer than expected from chains.
        read_s: a token of the text that the drafter has not processed yet.
    """

    plain_s: float
    verify_s: Sequence[float]
    draft_s: Sequence[float]
    overhead_s: Sequence[float]
    tree_factor: float = 1.0
    read_s: float = 0.0

    @classmethod
    def read(cls, table: CostTable, point: OperatingPoint, max_k: int, max_nodes: int) -> StepTimes:
        batch, context = point.batch, point.context
        by_rows = [table.verify_step_s(n + 1, context, batch) for n in range(max_nodes + 1)]
        # More sequences never take less, whatever noise there was between measured batches.
        by_batch = (table.draft_token_s(context, b + 1) for b in range(batch))
        return cls(
            plain_s=table.plain_step_s(context, batch),
            verify_s=spread(by_rows, batch),
            draft_s=tuple(accumulate(by_batch, max)),
            overhead_s=(0.0, *(table.overhead_s(k + 1, context, batch) for k in range(max_k))),
        )

    def chain_s(self, depth: int) -> float:
        return depth * self.draft_s[-1] + self.overhead_s[depth]

    def tree_s(self, depth: int) -> float:
        """Return the seconds of a step with trees beyond the target pass: drafting and overhead.

        A level below the first has several rows per sequence. Their cost to the drafter is taken to
        be that to the target, in proportion.
        """
        batch = len(self.draft_s)
        rows = min(len(self.verify_s) - 1, (USUAL_WIDTH - 1) * batch)
        more = (depth - 1) * (self.verify_s[rows] / self.verify_s[0] - 1.0)
        return (self.chain_s(depth) + more * self.draft_s[-1]) * self.tree_factor

    def verify_nodes_s(self, num_nodes: float) -> float:
        """Return the seconds of a pass with `num_nodes` drafted nodes, interpolated linearly."""
        below = int(num_nodes)
        share = num_nodes - below
        found = self.verify_s[below]
        return found + share * (self.verify_s[below + 1] - found) if share else found


class TimeFactor:
    """Ratio of measured to expected times: a discounted mean that outliers hardly move."""

    __slots__ = ("_was_slow", "config", "count", "total")

    def __init__(self, config: GoodputConfig) -> None:
        self.config = config
        self.count = self.total = 0.0
        self._was_slow = False

    def observe(self, measured_s: float, expected_s: float) -> None:
        """Count one step; two slow outliers in succession, or a fast one, start the mean again."""
        if measured_s <= 0.0 or expected_s <= 0.0:
            return
        config, count, total = self.config, self.count, self.total
        ratio, most = measured_s / expected_s, config.largest_ratio
        mean = total / count if count else ratio
        is_slow = ratio > most * mean
        if (is_slow and self._was_slow) or ratio * most < mean:
            count = total = 0.0
        elif is_slow:
            ratio = most * mean
        self._was_slow = is_slow
        self.count = count * config.memory + 1.0
        self.total = total * config.memory + ratio

    def value(self, prior: float) -> float:
        strength = self.config.cost_strength
        return (self.total + prior * strength) / (self.count + strength)

    def weaken(self) -> None:
        share = 1.0 / max(1.0, self.count)
        self.count *= share
        self.total *= share

    @property
    def mean(self) -> float:
        """The ratio without a prior; 1 before any step was measured."""
        return self.total / self.count if self.count else 1.0


class BatchCosts:
    """Ratios of measured to expected step times at one batch size."""

    def __init__(self, config: GoodputConfig) -> None:
        new = partial(TimeFactor, config)
        self.plain, self.target = new(), new()
        self.passes: Factors = defaultdict(new)
        self.levels: defaultdict[str, Factors] = defaultdict(partial(defaultdict, new))
        self.overheads: defaultdict[str, TimeFactor] = defaultdict(new)
        self.trees: defaultdict[str, TimeFactor] = defaultdict(new)
        self.deepest = 0

    def observe_pass(self, rows: int, measured_s: float, expected_s: float) -> None:
        self.target.observe(measured_s, expected_s)
        self.passes[rows].observe(measured_s, expected_s)

    def weaken(self) -> None:
        factors = [self.plain, self.target, *self.overheads.values(), *self.trees.values()]
        by_number = (self.passes, *self.levels.values())
        for factor in chain(factors, *(known.values() for known in by_number)):
            factor.weaken()


Factors = defaultdict[int, TimeFactor]
"""Factors by number of rows or of drafted levels; for levels, entry 0 is for all numbers."""


def ratios(factors: Factors, prior: float, most: int) -> list[float]:
    """Return the ratios at 1, 2, ...; the ratio at each is the prior of the next."""
    found = []
    for number in range(1, most + 1):
        if number in factors:
            prior = factors[number].value(prior)
        found.append(prior)
    return found


class CostModel:
    """Expected step times at every operating point.

    Args:
        max_tree_nodes: most nodes of a tree; the largest K where that is more.
        traits: properties of the drafters, by method.
    """

    def __init__(
        self,
        costs: Mapping[str, CostSource | None],
        max_k: int,
        max_tree_nodes: int,
        config: GoodputConfig,
        traits: Mapping[str, DrafterTraits] = MappingProxyType({}),
    ) -> None:
        self.methods = tuple(costs)
        self.traits = {method: traits.get(method, DrafterTraits()) for method in costs}
        self.config = config
        self.max_k = max_k
        self.max_nodes = max(max_k, max_tree_nodes)
        self._sources = costs
        self._target = next((source for source in costs.values() if source is not None), None)
        self._read: dict[OperatingPoint, dict[str, StepTimes]] = {}
        self._batches: dict[int, BatchCosts] = {}
        self._prompts = TimeFactor(config)  # seconds per token that the target reads
        self._reading: defaultdict[str, TimeFactor] = defaultdict(partial(TimeFactor, config))

    def largest_depth(self, method: str, batch: int) -> int:
        if self._sources[method] is not None:
            return self.max_k
        return min(self.max_k, self._costs(batch).deepest + 1)

    def largest_tree(self, method: str, batch: int) -> int:
        if self._sources[method] is not None:
            return self.max_nodes
        return min(self.max_nodes, 2 * max(self._costs(batch).passes, default=0) + 1)

    def times(self, point: OperatingPoint) -> dict[str, StepTimes]:
        """Return the expected step times of every drafter at an operating point."""
        costs, batch = self._costs(point.batch), point.batch
        scale = costs.target.mean
        # Plain steps are few, and no prior is better for them than the passes of other steps.
        plain = costs.plain.mean if costs.plain.count else scale
        # Without a profile a pass without drafted rows is taken to be a plain step.
        empty = plain if self._target is None else scale
        rows = [empty, *ratios(costs.passes, empty, self.max_nodes)]
        found = {}
        for method, times in self._expected(point).items():
            levels = costs.levels[method]
            by_depth = ratios(levels, levels[0].value(scale), self.max_k)
            own, level_s = costs.overheads[method], by_depth[-1] * times.draft_s[-1]
            # A level costs what it does in the deepest drafts; what shallower drafts take beyond
            # that is counted as overhead.
            overhead_s = [
                (own.value(scale) if own.count else ratio) * times.overhead_s[depth]
                + depth * (ratio * times.draft_s[-1] - level_s)
                for depth, ratio in enumerate(by_depth, start=1)
            ]
            by_rows = [a * b for a, b in zip(rows, times.verify_s[::batch], strict=True)]
            found[method] = StepTimes(
                plain_s=plain * times.plain_s,
                verify_s=spread(tuple(accumulate(by_rows, max)), batch),
                draft_s=[by_depth[-1] * seconds for seconds in times.draft_s],
                overhead_s=[0.0, *overhead_s],
                tree_factor=costs.trees[method].value(1.0),
                read_s=self._read_s(
                    method, by_depth[-1] * times.draft_s[-1], plain * times.plain_s
                ),
            )
        return found

    def _read_s(self, method: str, level_s: float, plain_s: float) -> float:
        """Return the seconds that a drafter reads one token, as measured or in proportion."""
        if not self.traits[method].reads_text:
            return 0.0
        if (measured := self._reading.get(method)) is not None:
            return measured.mean
        if self._prompts.count:
            return self._prompts.mean * level_s / plain_s
        return self.config.assumed_row * level_s

    def observe_prompt(self, record: StepRecord) -> None:
        """Update the seconds per prompt token of the target, from a step that read a prompt."""
        if record.num_prefill_rows >= LEAST_READ:
            self._prompts.observe(record.verify_s, record.batch_rows)

    def observe(
        self,
        records: Sequence[StepRecord],
        point: OperatingPoint,
        num_read: int = 0,
        rest: Rest = NO_REST,
    ) -> None:
        """Update the corrections from one step without prompts, decided at an operating point.

        Args:
            num_read: tokens that the drafter had to process before its draft.
            rest: plain steps before this one, which count with it if it is plain.
        """
        if len(records) != point.batch:
            return
        first, costs, expected = records[0], self._costs(point.batch), self._expected(point)
        drafted = [record for record in records if record.num_drafted]
        times = expected[self.methods[0]]
        if not drafted:
            beyond_s = first.draft_s + first.other_s
            tried = {record.method for record in records if record.k_budget}
            if not tried:
                # The step of a decision takes longer than those that follow without one.
                mean_s = (beyond_s + first.verify_s + rest.seconds) / (1 + rest.num_steps)
                costs.plain.observe(mean_s, times.plain_s)
                costs.target.observe(mean_s, times.plain_s)
            elif len(tried) == 1 and (method := tried.pop()) in expected:
                # The drafter found nothing to propose; a plain step would have been shorter.
                costs.overheads[method].observe(beyond_s, expected[method].overhead_s[1])
            return
        num_nodes = min(sum([record.num_drafted for record in drafted]), len(times.verify_s) - 1)
        rows = max(1, round(num_nodes / point.batch))
        costs.observe_pass(rows, first.verify_s, times.verify_nodes_s(num_nodes))
        methods = {record.method for record in drafted}
        if len(methods) > 1 or not methods <= expected.keys():
            return  # the times of two drafters cannot be told apart
        (method,) = methods
        draft_s = self._without_reading(method, records, point, num_read)
        times, own_s = expected[method], draft_s + first.other_s
        depths = [min(record.depth_drafted, self.max_k) for record in drafted]
        if any([record.path_children is not None for record in drafted]):
            now = self.times(point)[method]
            costs.trees[method].observe(own_s, now.tree_s(max(depths)) / now.tree_factor)
            return
        levels_s, deepest = 0.0, 0
        for count, depth in zip(range(len(depths), 0, -1), sorted(depths), strict=True):
            levels_s += (depth - deepest) * times.draft_s[count - 1]
            deepest = depth
        costs.deepest = max(costs.deepest, deepest)
        overhead_s, levels = times.overhead_s[deepest], costs.levels[method]
        if self._sources[method] is None:
            levels[0].observe(draft_s, levels_s)
            levels[deepest].observe(draft_s, levels_s)
            costs.overheads[method].observe(first.other_s, overhead_s)
        else:  # the engine counts the beginning of a draft as drafting, the table as overhead
            levels[0].observe(own_s, levels_s + overhead_s)

    def _without_reading(
        self, method: str, records: Sequence[StepRecord], point: OperatingPoint, num_read: int
    ) -> float:
        """Return the drafting time without that of reading, divided as the expected times are."""
        draft_s = records[0].draft_s
        if num_read < LEAST_READ or not self.traits[method].reads_text:
            return draft_s
        times = self.times(point)[method]
        levels_s = max(record.depth_drafted for record in records) * times.draft_s[-1]
        share = levels_s / (levels_s + num_read * times.read_s)
        self._reading[method].observe((1.0 - share) * draft_s, num_read)
        return share * draft_s

    def _costs(self, batch: int) -> BatchCosts:
        """Return the corrections at a batch size; a new one begins with those of the nearest."""
        found = self._batches.get(batch)
        if found is None:
            found = BatchCosts(self.config)
            if self._batches:
                nearest = min(self._batches, key=lambda known: abs(known - batch))
                found = deepcopy(self._batches[nearest])
                found.weaken()
            self._batches[batch] = found
        return found

    def _expected(self, point: OperatingPoint) -> dict[str, StepTimes]:
        """Return the step times of all drafters as profiled or assumed, read once per point."""
        found = self._read.get(point)
        if found is None:
            found = self._read[point] = {
                method: self._expected_of(method, point) for method in self._sources
            }
        return found

    def _expected_of(self, method: str, point: OperatingPoint) -> StepTimes:
        source = self._sources[method]
        temperature = 0.0 if point.greedy else 1.0
        known = source or self._target
        if known is not None:
            times = StepTimes.read(known.at(temperature), point, self.max_k, self.max_nodes)
            if source is not None:
                return times
            plain_s, verify_s = times.plain_s, times.verify_s
        else:
            num_nodes = self.max_nodes * point.batch
            plain_s = 1.0
            verify_s = [1.0 + self.config.assumed_row * nodes for nodes in range(num_nodes + 1)]
        assumed = self.traits[method].level_cost or self.config.assumed_level
        level_s = assumed * plain_s
        return StepTimes(
            plain_s=plain_s,
            verify_s=verify_s,
            draft_s=(level_s,) * point.batch,
            overhead_s=(0.0, *(self.config.assumed_level * plain_s,) * self.max_k),
        )


def spread(by_rows: Sequence[float], batch: int) -> tuple[float, ...]:
    """Interpolate times by rows per sequence to times by drafted nodes of a batch."""
    steps = [(after - before) / batch for before, after in pairwise(by_rows)]
    inner = (
        before + step * n
        for before, step in zip(by_rows, steps, strict=False)
        for n in range(batch)
    )
    return (*inner, by_rows[-1])
