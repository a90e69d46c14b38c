"""Finds changes of a server's figures: one CUSUM per figure, and one incident per cause.

A figure is a ratio of two counters, such as accepted tokens over drafts. Its counts are added up to
batches of about equal size; the mean and the spread between batches are learned from the first
ones and followed slowly. So the spread is that of the traffic, requests that differ included. A
time is compared with what is usual at the same number of running requests.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

_LEARNED = 60
"""Batches of history from which a change is called one; with fewer, its evidence must be more."""
_EARLY = 8
"""Batches of history from which a figure may have changed."""
_MEMORY = 1000
"""Batches over which mean and spread follow afterwards."""
_ALLOWED = 1.5
"""Deviation per batch, in spreads, that is no change: CUSUM's allowance k."""
_ALARM = 12.0
"""Sum of larger deviations, in spreads, at which a change is reported: CUSUM's limit h."""
_MOST = 5.0
"""Deviation that one batch counts for at most, in spreads."""
_LEARNED_MOST = 3.0
"""Deviation, in spreads, to which a batch is cut before the level is learned from it."""
_LEAST_SPREAD = 0.005
"""Least spread, of a share or of the logarithm of a figure, that deviations are divided by."""
_RETURNED = 8
"""Batches nearer to the usual level, less those nearer to the new one, after which it is usual."""
_LOAD_BIN = 0.2
"""Difference of the logarithms of loads at which times are learned apart."""
_KNOWN = 20
"""Batches from which the time at a load is known."""
MIN_DRAFTS = 500
"""Drafts of a batch, from which acceptance is judged."""
MAX_WATCHED = 8
"""Positions whose acceptance is watched."""
WINDOW_S = 1800.0
"""Seconds after an incident: changes that begin before belong to it, on half of the evidence."""
_EXPLAINED = 1.1
"""Rise of a time, relative to that of steps per token, up to which fewer accepted tokens explain
it: the levels of both are estimates."""
MAX_INCIDENTS = 100
Kind = Literal["alarm", "note", "possible"]
_POSITION = "acceptance at position "


class Growth(NamedTuple):
    """What the two counters of a figure have grown by since the last reading.

    Attributes:
        min_size: least growth of the denominator `under` that makes a batch.
        worse: 1 where a rise is for the worse, -1 where a fall is, 0 where every change matters.
        is_log: whether batches are compared by the logarithm of the ratio.
        load: running requests; None where the figure does not depend on them.
        least: the least spread that deviations are divided by.
    """

    series: str
    over: float
    under: float
    min_size: float
    worse: int = -1
    is_log: bool = False
    load: float | None = None
    least: float = _LEAST_SPREAD


class ChangePoint(Struct, frozen=True, kw_only=True):
    """A change of one figure.

    Attributes:
        started_s: Unix time at which deviations began; `noticed_s` is that of the report.
        before: mean before; of a time at the load that it has now.
        now: mean since it began.
    """

    series: str
    started_s: float
    noticed_s: float
    before: float
    now: float
    is_worse: bool

    @property
    def kind(self) -> Kind:
        """The kind of incident that the change makes."""
        return "alarm" if self.is_worse else "note"

    @property
    def words(self) -> str:
        """The change in one sentence, without its time."""
        verb = "fell" if self.now < self.before else "rose"
        return f"{self.series} {verb} from {self.before:.3g} to {self.now:.3g}"


class Incident(Struct, kw_only=True):
    """Changes of one cause: those that were noticed together, or soon after the first.

    Attributes:
        kind: "alarm"; "note", of figures that became better; "possible", by a short history.
        resolved_s: Unix time at which all its figures were back at their usual levels.
    """

    kind: Kind
    noticed_s: float
    changes: list[ChangePoint]
    causes: tuple[str, ...] = ()
    resolved_s: float | None = None

    @property
    def started_s(self) -> float:
        return min(change.started_s for change in self.changes)

    @property
    def words(self) -> str:
        """All changes in one sentence, positions that changed alike together."""
        groups: dict[tuple[object, ...], list[ChangePoint]] = {}
        for change in self.changes:
            is_position = change.series.startswith(_POSITION)
            key = (_POSITION, change.now < change.before) if is_position else (change.series,)
            groups.setdefault(key, []).append(change)
        texts = []
        for first, *others in groups.values():
            places = [change.series.removeprefix(_POSITION) for change in others]
            texts.append(first.words + (f" (so did {', '.join(places)})" if places else ""))
        text = "; ".join(texts)
        if self.resolved_s is not None:
            return f"back at the usual level: {text}"
        return f"by little history, may have changed: {text}" if self.kind == "possible" else text


class Level(Struct, kw_only=True):
    """Mean and variance of batches, and their mean size, that follow the last `_MEMORY` ones."""

    least: float = _LEAST_SPREAD
    num: int = 0
    mean: float = 0.0
    variance: float = 0.0
    size: float = 0.0

    def learn(self, value: float, under: float) -> None:
        self.num = min(self.num + 1, _MEMORY)
        rate = 1.0 / self.num
        difference = value - self.mean
        self.mean += rate * difference
        self.variance = (1.0 - rate) * (self.variance + rate * difference * difference)
        self.size += rate * (under - self.size)

    @property
    def spread(self) -> float:
        """The standard deviation between batches, larger where few batches tell it."""
        return max(math.sqrt(self.variance), self.least) * math.sqrt(1.0 + 8.0 / self.num)

    def measure_deviation(self, value: float, under: float) -> float:
        """Return by how many spreads a batch deviates."""
        # A batch larger than usual varies less; one that is smaller varies more.
        found = (value - self.mean) / self.spread * min(1.0, math.sqrt(under / self.size))
        return min(_MOST, max(-_MOST, found))


class LoadCurve(Struct):
    """The usual logarithm of a time by the logarithm of the load, linear between learned points.

    Attributes:
        points: by bin of the load; batches, and the means of both logarithms.
    """

    points: dict[int, tuple[int, float, float]] = {}

    def learn(self, load: float, value: float) -> None:
        x = math.log(load)
        place = round(x / _LOAD_BIN)
        num, mean_x, mean = self.points.get(place, (0, 0.0, 0.0))
        num = min(num + 1, _MEMORY)
        self.points[place] = num, mean_x + (x - mean_x) / num, mean + (value - mean) / num

    def find_bounds(self, load: float) -> tuple[float, float] | None:
        """Return between which values the logarithm is usual at this load; None if not known.

        Both are one between learned loads that are close. A time grows with the load, but at most
        in proportion.
        """
        known = sorted(point[1:] for point in self.points.values() if point[0] >= _KNOWN)
        if not known:
            return None
        x = math.log(load)
        place = bisect(known, (x,))
        if place == 0:
            return known[0][1] - (known[0][0] - x), known[0][1]
        if place == len(known):
            return known[-1][1], known[-1][1] + (x - known[-1][0])
        (left, low), (right, high) = known[place - 1 : place + 1]
        if right - left > 3 * _LOAD_BIN:
            return low, max(low, high)
        middle = low + (high - low) * (x - left) / (right - left)
        return middle, middle


class Cusum(Struct, kw_only=True):
    """Two-sided CUSUM of a ratio of counts (Page 1954), with a state that JSON can hold.

    Attributes:
        level: what is learned since the watch began or since the latest change.
        usual: the level before the latest change, until the figure has returned to it.
        changed_to: mean at that change.
        up: sum of deviations upwards; `down` of those downwards.
        started_s: time of the first of these deviations; None while there is none.
        over: numerator of the batch that is being filled; `under` is its denominator, and `loads`
            the load weighted with it.
        total: sum of the values since `started_s`, weighted with `weight`; `expected` likewise of
            what a load explains of them.
        is_told: whether it was reported that the figure may have changed.
    """

    worse: int = -1
    is_log: bool = False
    level: Level = msgspec.field(default_factory=Level)
    usual: Level | None = None
    changed_to: float = 0.0
    num_back: int = 0
    curve: LoadCurve = msgspec.field(default_factory=LoadCurve)
    up: float = 0.0
    down: float = 0.0
    started_s: float | None = None
    over: float = 0.0
    under: float = 0.0
    loads: float = 0.0
    total: float = 0.0
    expected: float = 0.0
    weight: float = 0.0
    is_told: bool = False

    def add(self, sample: Growth, at_s: float) -> bool:
        """Add counts; returns whether the batch that they fill shows a return to the usual."""
        self.over += sample.over
        self.under += sample.under
        self.loads += sample.under * (sample.load or 0.0)
        # Small batches at night vary more than those by day: all are to be of about one size.
        if self.under < max(sample.min_size, self.level.size / 2):
            return False
        over, under, load = self.over, self.under, self.loads / self.under
        self.over = self.under = self.loads = 0.0
        if self.is_log and over <= 0.0:
            return False
        value = math.log(over / under) if self.is_log else over / under
        expected = 0.0
        if sample.load is not None:
            bounds = self.curve.find_bounds(load)
            is_first = self.level.num == 0 and self.usual is None
            if self.excess < _ALARM / 2 and (is_first or self.level.num >= _EARLY):
                self.curve.learn(load, value - self.level.mean)
            if bounds is None or bounds[0] < value - self.level.mean < bounds[1]:
                return False  # a load that is new, at which a time as this one may be usual
            expected = min(max(value - self.level.mean, bounds[0]), bounds[1])
        self._compare(value - expected, expected, under, at_s)
        return self._has_returned(value - expected)

    @property
    def current(self) -> float:
        """The latest level that is known."""
        return self.level.mean if self.level.num else self.changed_to

    @property
    def excess(self) -> float:
        return max(self.up, self.down)

    @property
    def evidence(self) -> float:
        """The sum of deviations as a share of what shows a change, after a history as long."""
        return self.excess / _ALARM * min(1.0, self.level.num / _LEARNED)

    @property
    def may_have_changed(self) -> bool:
        """Whether deviations would show a change if the history were longer, and none was told."""
        return self.excess > _ALARM and self.evidence <= 1.0 and not self.is_told

    def _compare(self, value: float, expected: float, under: float, at_s: float) -> None:
        if self.level.num < _EARLY:
            self.level.learn(value, under)
            return
        deviation = self.level.measure_deviation(value, under)
        self.up = max(0.0, self.up + deviation - _ALLOWED)
        self.down = max(0.0, self.down - deviation - _ALLOWED)
        if self.excess == 0.0:
            self.started_s, self.is_told = None, False
        else:
            if self.started_s is None:
                self.started_s, self.total, self.expected, self.weight = at_s, 0.0, 0.0, 0.0
            self.total += under * value
            self.expected += under * expected
            self.weight += under
        if self.excess < (_ALARM / 2 if self.level.num >= _LEARNED else _ALARM / 4):
            # The first batches after a change must not pass for spread.
            most = _LEARNED_MOST * self.level.spread
            difference = value - self.level.mean
            self.level.learn(self.level.mean + min(most, max(-most, difference)), under)

    def _has_returned(self, value: float) -> bool:
        """Whether enough batches since the latest change are nearer to the level before it."""
        if self.usual is None:
            return False
        self.num_back = max(0, self.num_back + (1 if self._is_back(value) else -1))
        if self.num_back >= _RETURNED:
            self.restore()
            return True
        if self.level.num >= _MEMORY and (self.changed_to > self.usual.mean) != (self.worse > 0):
            self.usual = None  # what became better long ago is usual now
        return False

    def _is_back(self, value: float) -> bool:
        if self.usual is None:
            return False
        middle = (self.usual.mean + self.changed_to) / 2
        return (value > middle) == (self.usual.mean > middle)

    def restore(self) -> None:
        """Judge by the level before the latest change again."""
        self.level, self.usual = self.usual or self.level, None
        self._clear()

    def _clear(self) -> None:
        self.up, self.down, self.started_s, self.num_back, self.is_told = 0.0, 0.0, None, 0, False

    def describe(self, series: str, at_s: float) -> ChangePoint:
        """Return the change that the deviations are evidence of."""
        now, expected = self.total / self.weight, self.expected / self.weight
        before = self.level.mean
        if self.is_log:
            now, before = math.exp(now + expected), math.exp(before + expected)
        is_worse = self.worse == 0 or (self.up > self.down) == (self.worse > 0)
        return ChangePoint(
            series=series,
            started_s=at_s if self.started_s is None else self.started_s,
            noticed_s=at_s,
            before=before,
            now=now,
            is_worse=is_worse,
        )

    def accept(self) -> bool:
        """Learn the level since a change; returns False where that is the usual one again."""
        mean = self.total / self.weight
        if self._is_back(mean):
            self.restore()
            return False
        self.usual = self.usual or self.level
        self.level, self.changed_to = Level(least=self.level.least), mean
        self._clear()
        return True


class Watcher(Struct, kw_only=True):
    """Watches figures; changes of one cause make one incident.

    Attributes:
        incidents: the latest, resolved ones included.
        num_alarms: incidents for the worse since the watch began.
    """

    series: dict[str, Cusum] = {}
    incidents: list[Incident] = []
    num_alarms: int = 0

    def add(self, samples: Iterable[Growth], at_s: float) -> list[Incident]:
        """Add what was counted until a time; returns incidents that began or were resolved."""
        returned = []
        for sample in samples:
            cusum = self.series.setdefault(
                sample.series,
                Cusum(worse=sample.worse, is_log=sample.is_log, level=Level(least=sample.least)),
            )
            if cusum.add(sample, at_s):
                returned.append(sample.series)
        return [*self._begin(at_s, returned), *self._resolve(returned, at_s)]

    @property
    def missing(self) -> str:
        """What is missing until a change of any figure can be seen; "" where nothing is."""
        if any(each.level.num >= _EARLY or each.usual for each in self.series.values()):
            return ""
        drafts = self.series.get(f"{_POSITION}1", Cusum())
        num_drafts = drafts.level.num * drafts.level.size + drafts.under
        return (
            f"{num_drafts:.0f} drafts were counted since the first reading, and about "
            f"{_EARLY * MIN_DRAFTS} are needed"
        )

    def _begin(self, at_s: float, returned: list[str]) -> list[Incident]:
        is_new = any(each.evidence > 1.0 for each in self.series.values())
        begun: list[Incident] = []
        for name, cusum in self.series.items():
            alarm = self._find_current("alarm", cusum.started_s or at_s)
            if cusum.evidence <= (0.5 if alarm or is_new else 1.0):
                continue
            change = cusum.describe(name, at_s)
            if not cusum.accept():
                returned.append(name)
            elif current := (
                alarm
                or self._find_current(change.kind, change.started_s)
                or self._find_cause(change)
            ):
                current.changes.append(change)
            else:
                begun += self._open(change.kind, [change], at_s)
        return begun or self._report_possible(at_s)

    def _find_current(self, kind: Kind, started_s: float) -> Incident | None:
        """Return the incident that a change which began at this time belongs to."""
        for incident in reversed(self.incidents):
            if incident.kind == kind and started_s <= incident.noticed_s + WINDOW_S:
                return incident
        return None

    def _find_cause(self, change: ChangePoint) -> Incident | None:
        """Return the open fall of acceptance that explains a longer time.

        The time per token is that of a step over the tokens of a step, which are one and the
        accepted ones.
        """
        if not change.is_worse or self.series[change.series].worse <= 0:
            return None
        usual = {n: c.current for n, c in self.series.items() if n.startswith(_POSITION)}
        for incident in self.incidents:
            falls = [each for each in incident.changes if each.series.startswith(_POSITION)]
            if incident.kind == "alarm" and incident.resolved_s is None and falls:
                before = usual | {fall.series: fall.before for fall in falls}
                now = usual | {fall.series: fall.now for fall in falls}
                rise = (1.0 + sum(before.values())) / (1.0 + sum(now.values()))
                if change.now / change.before <= _EXPLAINED * rise:
                    return incident
        return None

    def _open(self, kind: Kind, changes: list[ChangePoint], at_s: float) -> list[Incident]:
        incident = Incident(kind=kind, noticed_s=at_s, changes=changes)
        self.incidents = [*self.incidents, incident][-MAX_INCIDENTS:]
        self.num_alarms += kind == "alarm"
        return [incident]

    def _report_possible(self, at_s: float) -> list[Incident]:
        changes = []
        for name, cusum in self.series.items():
            if cusum.may_have_changed:
                cusum.is_told = True
                change = cusum.describe(name, at_s)
                changes += [change] if change.is_worse else []
        if not changes or self._find_current("possible", at_s):
            return []
        return self._open("possible", changes, at_s)

    def _resolve(self, returned: list[str], at_s: float) -> list[Incident]:
        if not returned:
            return []
        found = []
        for incident in self.incidents:
            if incident.resolved_s is None and incident.kind != "possible":
                names = {change.series for change in incident.changes}
                if all(self.series[name].usual is None for name in names):
                    incident.resolved_s = at_s
                    found += [incident] if incident.kind == "alarm" else []
        return found


def sample_positions(accepted: Iterable[float], drafted: Iterable[float]) -> list[Growth]:
    """Return how many drafts accepted through each position, and how many drafted it."""
    return [
        Growth(f"{_POSITION}{place}", *counts, MIN_DRAFTS)
        for place, counts in zip(
            range(1, MAX_WATCHED + 1), zip(accepted, drafted, strict=False), strict=False
        )
    ]
