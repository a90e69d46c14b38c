"""Finds change points of a server's figures: one CUSUM per figure, over batches of its counts.

A figure is a ratio of two counters, such as accepted tokens over drafts. Its counts are added up to
batches of about equal size; the mean and the spread between batches are learned from the first
ones and followed slowly. So the spread is that of the traffic, requests that differ included.
"""

from __future__ import annotations

import math

from msgspec import Struct

_LEARNED = 60
"""Batches from which mean and spread are learned before any alarm."""
_MEMORY = 1000
"""Batches over which mean and spread follow afterwards."""
_ALLOWED = 1.5
"""Deviation per batch, in spreads, that is no change: CUSUM's allowance k."""
_ALARM = 12.0
"""Sum of larger deviations, in spreads, at which a change is reported: CUSUM's limit h."""
_MOST = 5.0
"""Deviation that one batch counts for at most, in spreads."""
_LEAST_SPREAD = 0.005
"""Least spread, of a share or of the logarithm of a figure, that deviations are divided by."""
MIN_DRAFTS = 500
"""Drafts of a batch, from which acceptance is judged."""
MAX_WATCHED = 8
"""Positions whose acceptance is watched."""


class ChangePoint(Struct, frozen=True, kw_only=True):
    """A change of one figure.

    Attributes:
        series: name of the figure.
        started_s: Unix time at which deviations began.
        noticed_s: Unix time of the alarm.
        before: mean before.
        now: mean since it began.
        causes: labels of the likeliest causes.
    """

    series: str
    started_s: float
    noticed_s: float
    before: float
    now: float
    causes: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The change in one sentence, without its time."""
        verb = "fell" if self.now < self.before else "rose"
        return f"{self.series} {verb} from {self.before:.3g} to {self.now:.3g}"


class Cusum(Struct, kw_only=True):
    """Two-sided CUSUM of a ratio of counts (Page 1954), with a state that JSON can hold.

    Attributes:
        num: batches learned from.
        mean: of the values: the ratio, or its logarithm where `is_log`.
        variance: between batches.
        size: mean denominator of a batch.
        up: sum of deviations upwards; `down` of those downwards.
        started_s: time of the first of these deviations; None while there is none.
        over: numerator of the batch that is being filled; `under` is its denominator.
        over_since: numerator since `started_s`; `under_since` is its denominator.
    """

    min_size: float
    is_log: bool = False
    num: int = 0
    mean: float = 0.0
    variance: float = 0.0
    size: float = 0.0
    up: float = 0.0
    down: float = 0.0
    started_s: float | None = None
    over: float = 0.0
    under: float = 0.0
    over_since: float = 0.0
    under_since: float = 0.0

    def add(self, series: str, over: float, under: float, at_s: float) -> ChangePoint | None:
        """Add counts; returns a change point where the batch that they fill shows one."""
        self.over += over
        self.under += under
        if self.under < self.min_size:
            return None
        over, under, self.over, self.under = self.over, self.under, 0.0, 0.0
        if self.is_log and over <= 0.0:
            return None
        value = math.log(over / under) if self.is_log else over / under
        if self.num < _LEARNED:
            self._learn(value, under, _LEARNED)
            return None
        spread = max(math.sqrt(self.variance), _LEAST_SPREAD)
        # A batch larger than usual varies less; one that is smaller varies more.
        deviation = (value - self.mean) / spread * min(1.0, math.sqrt(under / self.size))
        deviation = min(_MOST, max(-_MOST, deviation))
        self.up = max(0.0, self.up + deviation - _ALLOWED)
        self.down = max(0.0, self.down - deviation - _ALLOWED)
        if self.up == self.down == 0.0:
            self.started_s = None
        else:
            if self.started_s is None:
                self.started_s, self.over_since, self.under_since = at_s, 0.0, 0.0
            self.over_since += over
            self.under_since += under
        if max(self.up, self.down) > _ALARM:
            return self._raise_alarm(series, at_s)
        if max(self.up, self.down) < _ALARM / 2:
            self._learn(value, under, _MEMORY)
        return None

    def _learn(self, value: float, under: float, memory: int) -> None:
        self.num = min(self.num + 1, memory)
        rate = 1.0 / self.num
        difference = value - self.mean
        self.mean += rate * difference
        self.variance = (1.0 - rate) * (self.variance + rate * difference * difference)
        self.size += rate * (under - self.size)

    def _raise_alarm(self, series: str, at_s: float) -> ChangePoint:
        found = ChangePoint(
            series=series,
            started_s=at_s if self.started_s is None else self.started_s,
            noticed_s=at_s,
            before=math.exp(self.mean) if self.is_log else self.mean,
            now=self.over_since / self.under_since,
        )
        self.num, self.mean, self.variance, self.size = 0, 0.0, 0.0, 0.0
        self.up, self.down, self.started_s = 0.0, 0.0, None
        return found


def watch_position(
    series: dict[str, Cusum], position: int, accepted: float, drafted: float, at_s: float
) -> list[ChangePoint]:
    """Add how many drafts accepted through a position to its CUSUM; returns a change, if any."""
    if position > MAX_WATCHED:
        return []
    name = f"acceptance at position {position}"
    change = series.setdefault(name, Cusum(min_size=MIN_DRAFTS)).add(name, accepted, drafted, at_s)
    return [] if change is None else [change]
