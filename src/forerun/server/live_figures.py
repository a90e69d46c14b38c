"""Figures of the latest steps in bounded memory, with one slice of time per active second."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import groupby
from operator import add

from forerun.server.live_page import LivePoint, LivePosition, LiveSpeedup, LiveTokenTimes
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


@dataclass(slots=True)
class TimeSlice:
    """Counts and durations of the steps that began within one second.

    Attributes:
        sum_k: sum of K over steps of requests.
        decoded: times of all decode steps, by batch size, see `_bucket_of`.
        measured: tokens and seconds of the plain steps that a baseline rests on, by batch size.
    """

    second: int
    num_cycles: int = 0
    num_records: int = 0
    num_emitted: int = 0
    sum_k: int = 0
    decoded: dict[int, Seconds] = field(default_factory=dict)
    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    methods: Counter[str] = field(default_factory=Counter)
    measured: dict[int, tuple[int, float]] = field(default_factory=dict)

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

    def compared(self, baselines: Mapping[int, DiscountedRatio]) -> tuple[float, float]:
        """Return the time of decode steps, and the estimated plain time for the same tokens.

        `baselines` has plain seconds over tokens by batch size; steps at others are left out.
        """
        known = [(size, times) for size, times in self.decoded.items() if size in baselines]
        as_plain_s = sum(times.num_tokens * baselines[size].ratio for size, times in known)
        return sum(times.total_s for _, times in known), as_plain_s

    def point(self, now_s: float) -> LivePoint:
        """Return the slice as a point of the page's history plot."""
        drafted = self.counts.num_steps > 0
        return LivePoint(
            age_s=max(0.0, now_s - self.second),
            tokens_per_s=float(self.num_emitted),
            num_running=self.num_records / self.num_cycles,
            acceptance_length=self.counts.acceptance_length if drafted else None,
            num_speculative_tokens=self.sum_k / self.num_records,
            methods=dict(self.methods),
        )


class LiveFigures:
    """Averages the latest steps; memory does not grow with the number of steps.

    The speedup compares the time of all decode steps, those that measure the baseline included,
    with the time that plain steps at a like batch size would take for the same tokens. The baseline
    comes from the same seconds as the steps, because other programs may slow both for a while.
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
        first = cycle[0]
        second = math.floor(first.t_s)
        if not self.slices or self.slices[-1].second != second:
            self._end_slice()
            self.slices.append(TimeSlice(second))
        current = self.slices[-1]
        current.num_cycles += 1
        for record in cycle:
            current.add_record(record)
        # A step in which a drafter found nothing is not plain.
        is_plain = not any(record.k_budget for record in cycle)
        self._num_plain_in_a_row = self._num_plain_in_a_row + 1 if is_plain else 0
        if first.num_prefill_rows:
            return
        size = _bucket_of(len(cycle))
        current.decoded.setdefault(size, Seconds()).add(cycle)
        if self._num_plain_in_a_row > NUM_COLD:
            tokens_before, before_s = current.measured.get(size, (0, 0.0))
            seconds = first.draft_s + first.verify_s + first.other_s
            num_tokens = sum(record.num_emitted for record in cycle)
            current.measured[size] = (tokens_before + num_tokens, before_s + seconds)
            self.num_plain_steps += 1

    def _end_slice(self) -> None:
        for size, (num_emitted, seconds) in self.slices[-1].measured.items() if self.slices else ():
            baseline = self._baselines.setdefault(size, DiscountedRatio(PLAIN_MEMORY))
            baseline.observe(num_emitted, seconds)

    def baselines(self) -> dict[int, DiscountedRatio]:
        """Return plain seconds per token by batch size, where enough plain steps were measured."""
        found: dict[int, DiscountedRatio] = {}
        for piece in self.slices:
            for size, (num_emitted, seconds) in piece.measured.items():
                found.setdefault(size, DiscountedRatio(1.0)).observe(num_emitted, seconds)
        latest = {s: ratio for s, ratio in found.items() if ratio.num_pairs >= MIN_PLAIN_SECONDS}
        earlier = self._baselines.items()
        return {s: ratio for s, ratio in earlier if ratio.num_pairs >= MIN_PLAIN_SECONDS} | latest

    def speedup(self) -> LiveSpeedup | None:
        """Return the speedup in the window with its interval; None without a plain baseline."""
        baselines = self.baselines()
        paid = DiscountedRatio(1.0)
        compared: dict[int, Seconds] = {}
        num_decoded = 0
        for piece in self.window:
            seconds, as_plain_s = piece.compared(baselines)
            if seconds > 0.0:
                paid.observe(seconds, as_plain_s)
            for size, times in piece.decoded.items():
                num_decoded += times.num_tokens
                if size in baselines:
                    compared.setdefault(size, Seconds()).include(times)
        if not math.isfinite(paid.relative_error):
            return None
        as_plain_s = paid.y
        errors = [
            times.num_tokens * baselines[size].ratio / as_plain_s * baselines[size].relative_error
            for size, times in compared.items()
        ]
        error = Z * math.hypot(paid.relative_error, *errors)
        num_compared = sum(times.num_tokens for times in compared.values())
        return LiveSpeedup(
            value=paid.ratio,
            low=max(0.0, paid.ratio * (1.0 - error)),
            high=paid.ratio * (1.0 + error),
            plain_s=as_plain_s / num_compared,
            share_compared=num_compared / num_decoded,
            num_plain_steps=self.num_plain_steps,
        )

    @property
    def window(self) -> list[TimeSlice]:
        """Return the slices over which figures are averaged."""
        return list(self.slices)[-WINDOW_S:]

    @property
    def counts(self) -> AcceptanceCounts:
        """Return the counts of drafting steps in the window."""
        return reduce(add, (piece.counts for piece in self.window), AcceptanceCounts())

    def positions(self) -> Iterator[LivePosition]:
        """Yield acceptance by position in the window."""
        counts = self.counts
        pairs = zip(counts.drafted_per_position, counts.accepted_per_position, strict=True)
        for position, (drafted, accepted) in enumerate(pairs, start=1):
            yield LivePosition(position=position, num_drafted=drafted, num_accepted=accepted)

    def token_times(self) -> LiveTokenTimes | None:
        """Return the time per token of the window's decode steps, split into parts of a step.

        Where there are baselines, it is of the steps that the speedup compares, so that it and the
        plain time per token have the speedup as their ratio.
        """
        baselines = {} if self.speedup() is None else self.baselines()
        total = Seconds()
        for piece in self.window:
            for size, times in piece.decoded.items():
                if not baselines or size in baselines:
                    total.include(times)
        if not total.num_tokens:
            return None
        return LiveTokenTimes(
            num_steps=total.num_cycles,
            num_sequences=total.num_steps / total.num_cycles,
            draft_s=total.draft_s / total.num_tokens,
            verify_s=total.verify_s / total.num_tokens,
            other_s=total.other_s / total.num_tokens,
        )

    def tokens_per_s(self, now_s: float) -> float:
        """Return the tokens per second of the last seconds, idle time included."""
        recent = [piece for piece in self.slices if piece.second > now_s - RECENT_S]
        if not recent:
            return 0.0
        seconds = max(1.0, min(RECENT_S, now_s - recent[0].second))
        return sum(piece.num_emitted for piece in recent) / seconds


def _bucket_of(num_sequences: int) -> int:
    return num_sequences.bit_length()
