"""Intervals of proportions, means, ratios and medians, and tests of uniformity and of a fall.

Nothing here assumes a normal sample, and only `normal_interval` a normal estimate. Resampling draws
its indices from a hash of (seed, resample, draw), so an interval is a function of its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from forerun.theory.splitmix import INCREMENT, MASK, finalise

MASK_32 = (1 << 32) - 1
_LIKE_DRAFTS = 10.0
"""Drafts of one text are alike, so that so many of them count as one in a comparison."""
_LEAST_FALL = 0.1
"""Least difference that is a fall, and its least share of what was before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A point estimate and the ends of its confidence interval."""

    estimate: float
    low: float
    high: float

    def is_above(self, threshold: float) -> bool:
        """Return whether the whole interval lies above `threshold`."""
        return self.low > threshold

    def is_below(self, threshold: float) -> bool:
        """Return whether the whole interval lies below `threshold`; see `is_above`."""
        return self.high < threshold

    def show(self, spec: str = ".2f", gap: str = " ") -> str:
        """Return the text that all pages and tables print, such as "1.32 (1.21–1.43)"."""
        ends = f"{gap}({self.show_ends(spec)})" if self.low < self.high else ""
        return f"{self.estimate:{spec}}{ends}"

    def show_ends(self, spec: str = ".2f") -> str:
        return f"{self.low:{spec}}–{self.high:{spec}}"


def wilson_interval(num_successes: int, num_trials: int, confidence: float = 0.95) -> Interval:
    """Return Wilson's score interval of a proportion, which holds at 0, at 1 and for few trials.

    Source: Wilson 1927.
    """
    if not 0 <= num_successes <= num_trials or num_trials == 0:
        raise ValueError(f"{num_successes} successes of {num_trials} trials is no proportion")
    z = _find_normal_quantile(0.5 + _check_confidence(confidence) / 2)
    share = num_successes / num_trials
    shrink = 1 + z * z / num_trials
    centre = (share + z * z / (2 * num_trials)) / shrink
    spread = share * (1 - share) / num_trials + z * z / (4 * num_trials * num_trials)
    reach = z * math.sqrt(spread) / shrink
    # At 0 and 1 an end equals the estimate; rounding must not put it on the wrong side.
    low, high = max(0.0, centre - reach), min(1.0, centre + reach)
    return Interval(estimate=share, low=min(low, share), high=max(high, share))


def normal_interval(
    estimate: float, error: float, *, least: float = 0.0, most: float = math.inf
) -> Interval:
    """Return the 95% interval of an estimate whose distribution is nearly normal."""
    reach = _find_normal_quantile(0.975) * error
    return Interval(
        estimate=estimate, low=max(least, estimate - reach), high=min(most, estimate + reach)
    )


def divide(above: Interval, below: Interval) -> Interval:
    """Return the interval of a ratio; the relative errors of both are taken as independent."""
    estimate = above.estimate / below.estimate
    less = math.hypot(1 - above.low / above.estimate, 1 - below.estimate / below.high)
    more = math.hypot(above.high / above.estimate - 1, below.estimate / below.low - 1)
    return Interval(
        estimate=estimate, low=max(0.0, estimate * (1 - less)), high=estimate * (1 + more)
    )


def bootstrap(
    statistic: Callable[[Sequence[Sequence[int]]], float],
    sizes: Sequence[int],
    *,
    seed: int,
    confidence: float = 0.95,
    num_resamples: int = 2000,
) -> Interval:
    """Return a percentile bootstrap interval of any statistic of independent units, by group.

    Groups keep their sizes: the group of a unit is taken as planned, not as drawn.

    Source: Efron 1979.
    """
    tail = (1 - _check_confidence(confidence)) / 2
    resamples = zip(
        *(_draw_resamples(size, seed + group, num_resamples) for group, size in enumerate(sizes)),
        strict=True,
    )
    values = sorted(map(statistic, resamples))
    return Interval(
        estimate=statistic([range(size) for size in sizes]),
        low=quantile(values, tail),
        high=quantile(values, 1 - tail),
    )


def bootstrap_mean(
    values: Sequence[float], *, seed: int, confidence: float = 0.95, num_resamples: int = 2000
) -> Interval:
    """Return a percentile bootstrap interval of a mean.

    Source: Efron 1979.
    """
    ones = [1.0] * len(values)
    return bootstrap_ratio(
        values, ones, seed=seed, confidence=confidence, num_resamples=num_resamples
    )


def student_quantile(probability: float, freedom: float) -> float:
    """Return a quantile of Student's t (Cornish-Fisher), slightly low at two and three degrees."""
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    z = _find_normal_quantile(probability)
    first = (z**3 + z) / (4.0 * freedom)
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / (96.0 * freedom**2)
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / (384.0 * freedom**3)
    return z + first + second + third


def estimate_geometric_mean(logs: Sequence[float]) -> Interval:
    """Return the geometric mean and its 95% interval, by Student's t on independent logarithms.

    A single one has the interval from 0 to infinity.
    """
    if len(logs) == 1:
        return Interval(estimate=math.exp(logs[0]), low=0.0, high=math.inf)
    mean = math.fsum(logs) / len(logs)
    variance = math.fsum((value - mean) ** 2 for value in logs) / (len(logs) - 1)
    reach = student_quantile(0.975, len(logs) - 1) * math.sqrt(variance / len(logs))
    return widen_log(mean, reach)


def widen_log(centre: float, reach: float) -> Interval:
    """Return the interval of a quantity whose logarithm reaches so far to both sides."""
    low, estimate, high = (math.exp(centre + step) for step in (-reach, 0.0, reach))
    return Interval(estimate=estimate, low=low, high=high)


def student_tail(t: float, freedom: float) -> float:
    """Return P(T >= t) of Student's t."""
    from scipy.special import stdtr  # slow to import, and few commands need it

    return float(stdtr(freedom, -t))


def bootstrap_ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    seed: int,
    confidence: float = 0.95,
    num_resamples: int = 2000,
) -> Interval:
    """Return a percentile bootstrap interval of sum(numerators) / sum(denominators) over blocks.

    Whole pairs are resampled, so an effect of a block on both sides (a hot machine, a hard prompt)
    cancels as it did in the measurement.

    Raises:
        ValueError: fewer than two blocks, unequal lengths, a value that is not finite, a
            denominator that is not positive, or a confidence outside (0, 1).

    Source: Efron 1979.
    """
    _check_blocks(numerators, denominators)

    def ratio(groups: Sequence[Sequence[int]]) -> float:
        above = below = 0.0
        for index in groups[0]:
            above += numerators[index]
            below += denominators[index]
        return above / below

    found = bootstrap(
        ratio, [len(numerators)], seed=seed, confidence=confidence, num_resamples=num_resamples
    )
    return replace(found, estimate=math.fsum(numerators) / math.fsum(denominators))


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return an interval of a median between two order statistics, for any distribution.

    Fewer than six values cannot reach 95%; the interval is then their whole range.

    Raises:
        ValueError: there is no value, one is not finite, or confidence is outside (0, 1).

    Source: Thompson 1936.
    """
    ordered = sorted(values)
    if not ordered or not all(map(math.isfinite, ordered)):
        raise ValueError(f"a median of {len(ordered)} values needs at least one, all finite")
    rank = _find_median_rank(len(ordered), (1 - _check_confidence(confidence)) / 2)
    return Interval(estimate=quantile(ordered, 0.5), low=ordered[rank], high=ordered[-1 - rank])


@lru_cache(maxsize=1024)
def _find_median_rank(num_values: int, tail: float) -> int:
    """Return the largest rank that exceeds the median in at most `tail` of all samples.

    The number of values below the median is binomial with probability 1/2. The rank is 0 where even
    the smallest value exceeds the median more often than that.
    """
    from scipy.special import bdtrik  # slow to import, and few commands need it

    return max(0, int(bdtrik(tail, num_values, 0.5)))


def _check_blocks(numerators: Sequence[float], denominators: Sequence[float]) -> None:
    # Resampling one block returns that block: an interval of no width, which would "show" anything.
    if len(numerators) != len(denominators) or len(numerators) < 2:
        raise ValueError(
            f"{len(numerators)} numerators and {len(denominators)} denominators; "
            "blocks are paired, and it takes at least two for an interval"
        )
    for block, (above, below) in enumerate(zip(numerators, denominators, strict=True)):
        if not (math.isfinite(above) and math.isfinite(below) and below > 0.0):
            raise ValueError(
                f"block {block} is {above} / {below}; both must be finite, the second above 0"
            )


def _check_confidence(confidence: float) -> float:
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence}; it must be in (0, 1), for example 0.95")
    return confidence


@lru_cache(maxsize=64)
def _find_normal_quantile(probability: float) -> float:
    from statistics import NormalDist  # slow to import, and few commands need it

    return NormalDist().inv_cdf(probability)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of ascending values, interpolated linearly between order statistics."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


# Many figures are over the same blocks: their resamples are drawn once.
@lru_cache(maxsize=4)
def _draw_resamples(num_blocks: int, seed: int, num_resamples: int) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(_draw_indices(num_blocks, seed, resample)) for resample in range(num_resamples)
    )


def _draw_indices(num_blocks: int, seed: int, resample: int) -> Iterator[int]:
    """Yield `num_blocks` random indices with replacement, two from each 64-bit hash."""
    key = _mix(_mix(seed & MASK) ^ resample)
    for draw in range(num_blocks // 2):
        bits = _mix(key + draw)
        yield (bits >> 32) * num_blocks >> 32
        yield (bits & MASK_32) * num_blocks >> 32
    if num_blocks % 2:
        yield (_mix(key + num_blocks) >> 32) * num_blocks >> 32


def _mix(counter: int) -> int:
    return finalise(counter * INCREMENT)


class DiscountedRatio:
    """Estimates sum(y) / sum(x) under exponential weights.

    The error is that of the ratio estimator: the residuals y - ratio x, whose weighted squares are
    kept as moments (Cochran 1977, section 6.4).
    """

    __slots__ = ("memory", "num_pairs", "squares", "weight", "x", "xx", "xy", "y", "yy")

    def __init__(self, memory: float) -> None:
        self.memory = memory
        self.num_pairs = 0
        self.weight = self.squares = 0.0
        self.x = self.y = self.xx = self.xy = self.yy = 0.0

    def observe(self, x: float, y: float) -> None:
        memory = self.memory
        self.num_pairs += 1
        self.weight = self.weight * memory + 1.0
        self.squares = self.squares * memory * memory + 1.0
        self.x = self.x * memory + x
        self.y = self.y * memory + y
        self.xx = self.xx * memory + x * x
        self.xy = self.xy * memory + x * y
        self.yy = self.yy * memory + y * y

    @property
    def ratio(self) -> float:
        """Return sum(y) / sum(x), which needs at least one pair."""
        return self.y / self.x

    @property
    def relative_error(self) -> float:
        """Return the standard error over the ratio; it is infinite below two pairs."""
        if self.num_pairs < 2 or self.y == 0.0:
            return math.inf
        ratio = self.ratio
        left = max(0.0, self.yy - 2.0 * ratio * self.xy + ratio * ratio * self.xx)
        variance = left / self.weight
        equal = self.weight * self.weight / self.squares  # pairs of equal weight that are as good
        return math.sqrt(variance / max(1.0, equal - 1.0)) / (self.y / self.weight)


def uniformity_p_value(values: Sequence[float]) -> float:
    """Return the p-value of the Kolmogorov-Smirnov test that independent numbers are uniform."""
    return ks_p_value(ks_distance(values), len(values))


def ks_distance(values: Sequence[float]) -> float:
    """Return the largest distance between the empirical distribution function and the diagonal."""
    ordered = sorted(values)
    if not ordered or not (ordered[0] >= 0.0 and ordered[-1] <= 1.0):
        raise ValueError("uniformity takes one or more numbers from 0 to 1")
    num = len(ordered)
    return max(max((i + 1) / num - value, value - i / num) for i, value in enumerate(ordered))


def ks_p_value(distance: float, num_values: int) -> float:
    """Return P(D >= distance) of the Kolmogorov-Smirnov statistic of `num_values` numbers.

    This is the limiting distribution at an effective size, which is accurate from four values on.

    Source: Kolmogorov 1933; the effective size: Stephens 1970.
    """
    from scipy.special import kolmogorov  # slow to import, and few commands need it

    root = math.sqrt(num_values)
    return float(kolmogorov((root + 0.12 + 0.11 / root) * distance))


class Fall(NamedTuple):
    """The moment at which a share fell most.

    Attributes:
        cut: index of the first count after it.
        p_value: probability of such a fall, at any moment, by chance.
    """

    cut: int
    before: float
    now: float
    p_value: float


def find_fall(over: Sequence[float], under: Sequence[float]) -> Fall | None:
    """Return when `over` of `under`, counts in order of time, fell most; None where it did not.

    The error is the larger one of those between drafts, were all alike, and between the counts.
    """
    parts = [(a, n, a * a, a * n, n * n) for a, n in zip(over, under, strict=True)]
    before, after = [0.0] * 5, [sum(column) for column in zip(*parts, strict=True)] or [0.0] * 5
    usual = min(0.99, max(0.01, after[0] / max(1.0, after[1])))
    best, found = 0.0, None
    for cut, part in enumerate(parts[:-1], start=1):
        before = [x + y for x, y in zip(before, part, strict=True)]
        after = [x - y for x, y in zip(after, part, strict=True)]
        if min(before[1], after[1]) < 1.0:
            continue
        (high, one), (low, other) = map(_measure_share, (before, after))
        of_drafts = _LIKE_DRAFTS * usual * (1.0 - usual) * (1.0 / before[1] + 1.0 / after[1])
        t = (high - low) / math.sqrt(max(of_drafts, one + other))
        if t > best and high - low >= max(_LEAST_FALL, _LEAST_FALL * high):
            best, found = t, (cut, high, low)
    return found and Fall(*found, min(1.0, len(parts) * math.erfc(best / math.sqrt(2.0)) / 2.0))


def _measure_share(sums: Sequence[float]) -> tuple[float, float]:
    """Return a share, and its variance by the spread of the counts."""
    over, under, squares, products, weights = sums
    share = over / under
    return share, (squares - 2.0 * share * products + share * share * weights) / under**2
