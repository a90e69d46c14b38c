"""Figures of the latest steps in bounded memory, with one slice of time per active second."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import groupby
from operator import add

from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.intervals import DiscountedRatio
from forerun.theory.record import StepRecord
from forerun.trace.cycles import Seconds

HISTORY_S = 120
"""Seconds with activity that are kept."""
WINDOW_S = 60
"""Seconds with activity over which acceptance and times are averaged."""
RECENT_S = 10.0
"""Seconds over which the rate of tokens is averaged."""
PLAIN_MEMORY = 0.95
"""Weight that a second with plain steps keeps in the baseline after one more.

Steps of one second are slow or fast together, so that seconds, not steps, show the error.
"""
MIN_PLAIN_SECONDS = 3
NUM_COLD = 1
"""Plain steps that are not measured after a drafter was asked.

Drafting leaves the target's weights uncached.
"""
Z = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """The time that plain steps would take for the latest tokens, over the time that they took.

    Attributes:
        low: lower end of the 95% interval, `high` its upper end.
        plain_s: time per token of plain steps.
        share_compared: of the tokens, the share of the batch sizes that are compared.
        num_plain_steps: plain steps that were measured since the start.
    """

    value: float
    low: float
    high: float
    plain_s: float
    share_compared: float
    num_plain_steps: int


@dataclass(slots=True)
class TimeSlice:
    """Counts and durations of the steps that began within one second.

    Attributes:
        sum_k: sum of K over steps of requests.
        decoded: times of all decode steps, by the bits of the batch size.
        measured: those of the plain steps that a baseline rests on.
    """

    second: int
    num_records: int = 0
    num_emitted: int = 0
    sum_k: int = 0
    decoded: dict[int, Seconds] = field(default_factory=dict)
    measured: dict[int, Seconds] = field(default_factory=dict)
    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    methods: Counter[str] = field(default_factory=Counter)

    def add_record(self, record: StepRecord) -> None:
        """Count one step of a request."""
        self.num_records += 1
        self.num_emitted += record.num_emitted
        self.sum_k += record.k_budget
        if record.num_drafted:
            depth, accepted = record.depth_drafted, record.num_accepted
            self.counts.add(depth, accepted, num_drafted=record.num_drafted)
            self.methods[record.method] += 1
        else:
            self.methods["no proposal" if record.k_budget else "plain"] += 1

    def point(self, now_s: float) -> dict[str, object]:
        """Return the slice as a point of the page's history plot; K is the mean of the plans."""
        return {
            "age_s": max(0.0, now_s - self.second),
            "tokens_per_s": float(self.num_emitted),
            "num_speculative_tokens": self.sum_k / self.num_records,
            "methods": dict(self.methods),
        }


class LiveFigures:
    """Averages the latest steps; memory does not grow with the number of steps.

    The speedup compares the time of all decode steps, those that measure the baseline included,
    with the time that plain steps at a like batch size would take for the same tokens. Steps that
    read prompts are left out. The baseline comes from the same seconds as the steps, because other
    programs may slow both for a while.
    """

    def __init__(self) -> None:
        self.slices: deque[TimeSlice] = deque(maxlen=HISTORY_S)
        self.num_plain_steps = 0
        self._baselines: dict[int, DiscountedRatio] = {}
        self._num_plain_in_a_row = 0

    def add(self, records: Iterable[StepRecord]) -> None:
        """Count steps, in order; the records of one cycle must come in one call."""
        for _, cycle in groupby(records, key=lambda record: record.cycle_id):
            self._add_cycle(list(cycle))

    def _add_cycle(self, cycle: Sequence[StepRecord]) -> None:
        second = math.floor(cycle[0].t_s)
        if not self.slices or self.slices[-1].second != second:
            if self.slices:
                _observe(self._baselines, self.slices[-1], PLAIN_MEMORY)
            self.slices.append(TimeSlice(second))
        current = self.slices[-1]
        for record in cycle:
            current.add_record(record)
        # A step in which a drafter found nothing is not plain.
        is_plain = not any(record.k_budget for record in cycle)
        self._num_plain_in_a_row = self._num_plain_in_a_row + 1 if is_plain else 0
        if cycle[0].num_prefill_rows:
            return
        size = len(cycle).bit_length()
        current.decoded.setdefault(size, Seconds()).add(cycle)
        if self._num_plain_in_a_row > NUM_COLD:
            current.measured.setdefault(size, Seconds()).add(cycle)
            self.num_plain_steps += 1

    def baselines(self) -> dict[int, DiscountedRatio]:
        """Return plain seconds per token by batch size, where enough plain steps were measured."""
        latest: dict[int, DiscountedRatio] = {}
        for piece in self.slices:
            _observe(latest, piece, 1.0)
        both = [*self._baselines.items(), *latest.items()]
        return {size: ratio for size, ratio in both if ratio.num_pairs >= MIN_PLAIN_SECONDS}

    def compare(self) -> tuple[Speedup | None, Seconds]:
        """Return the speedup in the window, and the times of the steps that it compares.

        Without a plain baseline there is no speedup, and the times are those of all decode steps.
        """
        baselines = self.baselines()
        paid = DiscountedRatio(1.0)
        everything, compared = Seconds(), Seconds()
        as_plain_s = dict.fromkeys(baselines, 0.0)
        for piece in self.window:
            seconds = plain_s = 0.0
            for size, times in piece.decoded.items():
                everything.include(times)
                if size in baselines:
                    compared.include(times)
                    seconds += times.total_s
                    plain_s += times.num_tokens * baselines[size].ratio
                    as_plain_s[size] += times.num_tokens * baselines[size].ratio
            if seconds > 0.0:
                paid.observe(seconds, plain_s)
        if not math.isfinite(paid.relative_error):
            return None, everything
        errors = [as_plain_s[s] / paid.y * b.relative_error for s, b in baselines.items()]
        error = Z * math.hypot(paid.relative_error, *errors)
        found = Speedup(
            value=paid.ratio,
            low=max(0.0, paid.ratio * (1.0 - error)),
            high=paid.ratio * (1.0 + error),
            plain_s=paid.y / compared.num_tokens,
            share_compared=compared.num_tokens / everything.num_tokens,
            num_plain_steps=self.num_plain_steps,
        )
        return found, compared

    @property
    def window(self) -> list[TimeSlice]:
        """Return the slices over which figures are averaged."""
        return list(self.slices)[-WINDOW_S:]

    @property
    def counts(self) -> AcceptanceCounts:
        """Return the counts of drafting steps in the window."""
        return reduce(add, (piece.counts for piece in self.window), AcceptanceCounts())

    def tokens_per_s(self, now_s: float) -> float:
        """Return the tokens per second of the last seconds, idle time included."""
        recent = [piece for piece in self.slices if piece.second > now_s - RECENT_S]
        if not recent:
            return 0.0
        seconds = max(1.0, min(RECENT_S, now_s - recent[0].second))
        return sum(piece.num_emitted for piece in recent) / seconds


def _observe(baselines: dict[int, DiscountedRatio], piece: TimeSlice, memory: float) -> None:
    """Add the plain steps of a slice to the baselines of their batch sizes."""
    for size, times in piece.measured.items():
        baseline = baselines.setdefault(size, DiscountedRatio(memory))
        baseline.observe(times.num_tokens, times.total_s)
