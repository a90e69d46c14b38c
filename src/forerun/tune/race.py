"""Which arm is measured next at which load, which one is given up and why, and which one wins.

Successive halving with confidence intervals. In a round every arm that is left answers the same
prompts; an arm is given up once it is shown to be slower than the fastest, or where the time does
not reach for all that are left. Pure functions of the measured blocks: no clock, no server.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from forerun.theory.intervals import (
    Interval,
    estimate_geometric_mean,
    student_quantile,
    widen_log,
)
from forerun.tune.arms import NONE, Load

LEAST_BLOCKS = 3
"""Blocks of every arm before one is given up as slower."""
LEAST_STARTS = 2
"""Starts of every server before then, where servers run one at a time."""
LEVEL = 0.02
"""Probability with which one round gives up the fastest arm, at most; shared by all its rivals.

Over whole races it is about the same, as tests/tune/test_race.py shows by simulation: a later round
knows more, and an arm must be 3% or more slower than the fastest to count as an error.
"""
CLOSE = 0.98
"""Arms that reach this share of the fastest one's tokens/s are as good as it."""
LEAST_GAIN = 1.02
"""Least speedup over the baseline that is worth a recommendation."""
NO_TIME = "given up for lack of time, not shown to be slower"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """Output tokens and seconds of one block; blocks of one load and index have the same prompts.

    Attributes:
        index: number of the block at its load, from 0.
        unit: blocks of one unit are not independent: one start of the server had them.
    """

    arm: str
    load: Load
    index: int
    unit: int
    num_tokens: int
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """An arm that is measured no more at a load, and why."""

    arm: str
    load: Load
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is known of one arm at one load.

    Attributes:
        speedup: tokens/s over those of the baseline, with the 95% interval; None without a block
            that both have.
        reason: why it was given up; None while it is measured.
    """

    arm: str
    speedup: Interval | None
    num_blocks: int
    reason: str | None = None


def estimate_speedup(blocks: Sequence[BlockTimes], baseline: Sequence[BlockTimes]) -> Interval:
    """Return the ratio of tokens/s over blocks that both arms have, with its 95% interval.

    It is the geometric mean of the ratios, averaged over the blocks of a unit.

    Raises:
        ValueError: no index is shared.
    """
    sides = [{block.index: block for block in side} for side in (blocks, baseline)]
    differences = [first - second for first, second in _average_units(sides)]
    if not differences:
        raise ValueError("the arms have no block of the same prompts")
    return estimate_geometric_mean(differences)


def pays(speedup: Interval | None) -> bool:
    """Return whether an arm is shown to be faster than the baseline, by enough to matter."""
    return speedup is not None and speedup.is_above(1.0) and speedup.estimate >= LEAST_GAIN


def _average_units(sides: Sequence[Mapping[int, BlockTimes]]) -> list[list[float]]:
    """Return the mean logarithm of every arm's tokens/s, by unit of the blocks that all have."""
    units = defaultdict[tuple[int, ...], list[list[float]]](list)
    for index in sorted(set.intersection(*map(set, sides))):
        blocks = [side[index] for side in sides]
        rates = [math.log(block.num_tokens / block.wall_s) for block in blocks]
        units[tuple(block.unit for block in blocks)].append(rates)
    return [[fmean(rates) for rates in zip(*rows, strict=True)] for rows in units.values()]


class Race:
    """The arms that are left at every load, by what was measured.

    Args:
        arms: "none" is the baseline; without it the first one is. The baseline is always measured.
        max_rounds: after so many rounds the arms that are left are ranked as they are.
        blocks_per_round: of every arm; with more than 1, each arm has all of its blocks of a round,
            of all loads, in succession, which suits servers that cannot run side by side.
    """

    def __init__(
        self,
        arms: Sequence[str],
        loads: Sequence[Load],
        *,
        max_rounds: int = 12,
        blocks_per_round: int = 1,
    ) -> None:
        self.arms, self.loads = tuple(arms), tuple(loads)
        self.baseline = NONE if NONE in arms else self.arms[0]
        self.max_rounds, self.blocks_per_round = max_rounds, blocks_per_round
        self.is_out_of_time = False
        self._blocks: dict[tuple[str, Load], dict[int, BlockTimes]] = {
            (arm, load): {} for arm in arms for load in loads
        }
        self._reasons: dict[tuple[str, Load], str] = {}
        self._slower_than: dict[tuple[str, Load], str] = {}
        self._close: set[Load] = set()
        self._num_compared = dict.fromkeys(loads, 0)

    def add(self, block: BlockTimes) -> None:
        """Add a measured block, now or of an interrupted run."""
        self._blocks[block.arm, block.load][block.index] = block

    def give_up(self, arm: str, reason: str, load: Load | None = None) -> None:
        """Measure an arm no more, at one load or at all; an earlier reason is kept.

        Arms that were given up because this one was faster are measured again.
        """
        for each in self.loads if load is None else (load,):
            self._reasons.setdefault((arm, each), reason)
            revived = [k for k, by in self._slower_than.items() if k[1] == each and by == arm]
            for key in revived:
                del self._slower_than[key], self._reasons[key]
            if revived:
                self._close.discard(each)
                self._num_compared[each] = 0

    def end(self) -> None:
        """Rank the arms as they are, because the time is over."""
        self.is_out_of_time = True
        for load in self.loads:
            for arm in self.living(load):
                if not self._blocks[arm, load] and arm != self.baseline:
                    self._reasons[arm, load] = NO_TIME

    def living(self, load: Load) -> list[str]:
        """Return the arms that are still measured at a load, the baseline among them."""
        return [arm for arm in self.arms if (arm, load) not in self._reasons]

    def count_rounds(self, load: Load) -> int:
        """Return the number of rounds that all arms that are left have finished."""
        return len(self._find_shared(load)) // self.blocks_per_round

    def is_decided(self, load: Load) -> bool:
        """Return whether more rounds at a load would not change what is recommended."""
        is_over = self.is_out_of_time or self.count_rounds(load) >= self.max_rounds
        if is_over or load in self._close or not self.living(load):
            return True
        rivals = self._list_rivals(load)
        if len(self._list_units(load)) < self._least_units or len(rivals) > 1:
            return False
        speedup = self._estimate(rivals[0] if rivals else self.baseline, load)
        return speedup is not None and (speedup.is_above(1.0) or speedup.is_below(LEAST_GAIN))

    def plan_round(self) -> list[tuple[str, Load, int]]:
        """Return what is measured next, as arm, load and index; nothing once all is decided.

        The order of the arms is reversed from round to round, so that a machine that becomes slower
        slows no arm more than others.
        """
        loads = [load for load in self.loads if not self.is_decided(load)]
        planned = []
        for load in loads:
            first = self.count_rounds(load) * self.blocks_per_round
            backward = -1 if self.count_rounds(load) % 2 else 1
            planned += [
                (arm, load, index)
                for index in range(first, first + self.blocks_per_round)
                for arm in self.living(load)[::backward]
                if index not in self._blocks[arm, load]
            ]
        if self.blocks_per_round > 1:
            order = list(dict.fromkeys(arm for arm, _, _ in planned))
            planned.sort(key=lambda block: order.index(block[0]))
        return planned

    def finish_round(self, seconds_left: float, arm_s: float = 0.0) -> list[GivenUp]:
        """Give up arms after a round, and return them.

        Call it also after the blocks of an interrupted run were added.

        Args:
            seconds_left: for further rounds.
            arm_s: seconds that every arm needs in a round beside its blocks, such as for a start.
        """
        dropped = list[GivenUp]()
        for load in self.loads:
            if len(self._list_rivals(load)) < 2:
                continue
            number = len(self._list_units(load))
            if number < max(self._least_units, self._num_compared[load] + 1):
                continue
            self._num_compared[load] = number
            leader, ratios = self._compare(load)
            ratios.pop(self.baseline, None)
            for arm, ratio in ratios.items():
                if ratio.is_below(1.0):
                    units = f"{number} {'blocks' if self.blocks_per_round == 1 else 'starts'}"
                    reason = f"{ratio.show()} of the tokens/s of {leader}, {units}"
                    dropped.append(GivenUp(arm=arm, load=load, reason=reason))
                    self._slower_than[arm, load] = leader
            if all(ratio.is_below(1.0) or ratio.is_above(CLOSE) for ratio in ratios.values()):
                self._close.add(load)
        for one in dropped:
            self._reasons[one.arm, one.load] = one.reason
        return dropped + self._save_time(seconds_left, arm_s)

    def _save_time(self, seconds_left: float, arm_s: float) -> list[GivenUp]:
        """Give up the slower half of the arms at the costliest load until a round fits the time."""
        dropped = list[GivenUp]()
        while True:
            costs = {load: self._round_s(load) for load in self.loads if not self.is_decided(load)}
            arms = {arm for load in costs for arm in self.living(load)}
            if not costs or sum(costs.values()) + arm_s * len(arms) <= seconds_left:
                return dropped
            several = [
                load
                for load in costs
                if self._find_shared(load) and len(self._list_rivals(load)) > 1
            ]
            if not several:
                self.end()
                return dropped
            load = max(several, key=lambda load: costs[load])
            order = sorted(self._list_rivals(load), key=lambda arm: -self._compute_speed(arm, load))
            for arm in order[(len(order) + 1) // 2 :]:
                dropped.append(GivenUp(arm=arm, load=load, reason=NO_TIME))
                self.give_up(arm, NO_TIME, load)

    def rank(self, load: Load) -> list[Standing]:
        """Return all arms, those that are left first, and the faster of them first."""
        found = [
            Standing(
                arm=arm,
                speedup=self._estimate(arm, load),
                num_blocks=len(self._blocks[arm, load]),
                reason=self._reasons.get((arm, load)),
            )
            for arm in self.arms
        ]
        return sorted(
            found,
            key=lambda s: (s.reason is not None, 0.0 if s.speedup is None else -s.speedup.estimate),
        )

    def recommend(self, load: Load) -> Standing:
        """Return the fastest arm that is left if it is shown to pay, and else the baseline."""
        ranked = self.rank(load)
        if pays(ranked[0].speedup):
            return ranked[0]
        return next(standing for standing in ranked if standing.arm == self.baseline)

    def _list_rivals(self, load: Load) -> list[str]:
        """Return the arms that are left beside the baseline."""
        return [arm for arm in self.living(load) if arm != self.baseline]

    def _estimate(self, arm: str, load: Load) -> Interval | None:
        """Return the speedup over the baseline; None without a block that both have."""
        if arm == self.baseline:
            return Interval(estimate=1.0, low=1.0, high=1.0)
        blocks, base = (self._blocks[name, load] for name in (arm, self.baseline))
        if not blocks.keys() & base.keys():
            return None
        return estimate_speedup([*blocks.values()], [*base.values()])

    def _find_shared(self, load: Load) -> list[int]:
        """Return the indices of the blocks that all arms that are left have."""
        sets = [self._blocks[arm, load].keys() for arm in self.living(load)]
        return sorted(set.intersection(*map(set, sets))) if sets else []

    @property
    def _least_units(self) -> int:
        """Units of every arm before one is given up as slower."""
        return LEAST_BLOCKS if self.blocks_per_round == 1 else LEAST_STARTS

    def _list_units(self, load: Load) -> list[list[float]]:
        """Return the mean logarithms of tokens/s of the arms that are left, by unit."""
        return _average_units([self._blocks[arm, load] for arm in self.living(load)])

    def _compute_speed(self, arm: str, load: Load) -> float:
        """Return the mean logarithm of tokens/s over the units that all have."""
        place = self.living(load).index(arm)
        return fmean(unit[place] for unit in self._list_units(load))

    def _round_s(self, load: Load) -> float:
        """Return the seconds of one more round of the arms that are left; 0 if unknown."""
        times = [[b.wall_s for b in self._blocks[arm, load].values()] for arm in self.living(load)]
        return self.blocks_per_round * sum(fmean(walls) for walls in times if walls)

    def _compare(self, load: Load) -> tuple[str, dict[str, Interval]]:
        """Return the fastest arm, and the ratio of the others' tokens/s to its own.

        The variance of a difference is the larger of two: that of its own units, and twice the
        residual variance of all arms that are left after the means of arms and units are taken
        out. Few units alone would say nothing, and an arm may vary more than others.
        """
        units, names = self._list_units(load), self.living(load)
        rates = dict(zip(names, zip(*units, strict=True), strict=True))
        means = {arm: fmean(rates[arm]) for arm in names}
        leader = max(names, key=lambda arm: means[arm])
        overall = fmean(means.values())
        residuals = (
            rate - means[arm] - fmean(unit) + overall
            for unit in units
            for arm, rate in zip(names, unit, strict=True)
        )
        freedom = (len(names) - 1) * (len(units) - 1)
        pooled = 2.0 * math.fsum(value * value for value in residuals) / freedom
        t = student_quantile(1.0 - LEVEL / (len(names) - 1), freedom)
        found = {}
        for arm in names:
            if arm != leader:
                pairs = zip(rates[arm], rates[leader], strict=True)
                own = variance(one - other for one, other in pairs)
                reach = t * math.sqrt(max(pooled, own) / len(units))
                found[arm] = widen_log(means[arm] - means[leader], reach)
        return leader, found
