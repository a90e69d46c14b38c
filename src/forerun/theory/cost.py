"""Cost tables: measured times of drafting, verification and reading, interpolated between them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from forerun.theory.intervals import Interval
from forerun.theory.speedup import cycle_cost


class CostReading(NamedTuple):
    """A time and half the width of its 95% interval, which is 0 where it is not known."""

    s: float
    error_s: float = 0.0

    def times(self, factor: float) -> CostReading:
        """Return both values multiplied by a factor."""
        return CostReading(self.s * factor, self.error_s * factor)


def combine(weights: Sequence[float], times: Sequence[CostReading]) -> CostReading:
    """Return a weighted sum; the errors are taken as independent."""
    return CostReading(
        s=math.fsum(w * reading.s for w, reading in zip(weights, times, strict=True)),
        error_s=math.hypot(*(w * r.error_s for w, r in zip(weights, times, strict=True))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostLine:
    """Measured times at one batch size and one context length.

    Noise can make more rows look cheaper than fewer; rows are read through their isotonic fit, so v
    never falls. Beyond the most rows the pass grows in proportion to them, an overestimate, so that
    an unmeasured K is not chosen for looking free. What a cycle takes beyond drafting and the
    pass is read as it is, linear in K between measured K; see `interpolate` for what lies outside.

    Attributes:
        rows: measured rows per sequence, ascending from 1; a pass has `batch` times as many.
        verify_s: target pass, per row count.
        plain_s: a whole plain decode step.
        draft_s: what each drafted token adds to a cycle.
        overhead_ks: measured K, ascending from 1 or more.
        overhead_s: what a cycle takes beyond drafting and the pass, per entry of overhead_ks.
        verify_error_s: half the 95% interval of each verify_s; empty where not known.
        plain_error_s: the same of plain_s, 0 where not known.
        overhead_error_s: of each overhead_s, beside the errors of drafting and of the pass; empty
            where not known.
    """

    batch: int = 1
    context: int = 0
    rows: tuple[int, ...]
    verify_s: tuple[float, ...]
    plain_s: float
    draft_s: float
    overhead_ks: tuple[int, ...] = (1,)
    overhead_s: tuple[float, ...] = (0.0,)
    verify_error_s: tuple[float, ...] = ()
    plain_error_s: float = 0.0
    draft_error_s: float = 0.0
    overhead_error_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse measurements that contradict each other or are no times."""
        if self.batch < 1 or self.context < 0:
            raise ValueError(
                f"batch is {self.batch} and context {self.context}; they start at 1 and 0"
            )
        _check_sizes("rows", self.rows)
        if self.rows[0] != 1:
            raise ValueError(f"rows is {list(self.rows)}; it must begin at 1")
        _check_sizes("overhead_ks", self.overhead_ks)
        self._check_lengths("rows", "verify_s", "verify_error_s")
        self._check_lengths("overhead_ks", "overhead_s", "overhead_error_s")
        _check_times("verify_s", self.verify_s, allow_zero=False)
        _check_times("plain_s", [self.plain_s], allow_zero=False)
        for name in ("verify_error_s", "overhead_s", "overhead_error_s"):
            _check_times(name, getattr(self, name))
        for name in _SCALARS:
            _check_times(name, [getattr(self, name)])

    def verify(self, num_rows: int) -> CostReading:
        """Return the time of a target pass over `num_rows` rows of each sequence."""
        measured_rows = min(num_rows, self.rows[-1])
        readings = _fit(self.verify_s, self.verify_error_s)
        fitted = interpolate(self.rows, readings, measured_rows)
        return fitted.times(num_rows / measured_rows)

    @property
    def plain(self) -> CostReading:
        return CostReading(self.plain_s, self.plain_error_s)

    @property
    def draft(self) -> CostReading:
        """Return the time of one more drafted token."""
        return CostReading(self.draft_s, self.draft_error_s)

    def overhead(self, num_speculative_tokens: int) -> CostReading:
        """Return the time of a cycle at K beyond drafting and the target pass."""
        errors_s = self.overhead_error_s or (0.0,) * len(self.overhead_s)
        measured = tuple(map(CostReading, self.overhead_s, errors_s))
        return interpolate(self.overhead_ks, measured, num_speculative_tokens)

    def _check_lengths(self, sizes: str, times: str, errors: str) -> None:
        wanted = len(getattr(self, sizes))
        for name in (times, errors) if getattr(self, errors) else (times,):
            if (found := len(getattr(self, name))) != wanted:
                raise ValueError(
                    f"{name} has {found} entries; it needs {wanted}, as many as {sizes}"
                )


_SCALARS = ("plain_s", "draft_s", "plain_error_s", "draft_error_s")


def interpolate(xs: Sequence[int], readings: Sequence[CostReading], x: float) -> CostReading:
    """Interpolate linearly: constant before the first point, a rising slope after the last."""
    if len(xs) == 1 or x <= xs[0]:
        return readings[0]
    right = min(bisect_right(xs, x), len(xs) - 1)
    below, above = readings[right - 1], readings[right]
    if x > xs[-1] and above.s <= below.s:
        return above
    weight = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    return CostReading(
        s=below.s + weight * (above.s - below.s),
        error_s=abs(1 - weight) * below.error_s + weight * above.error_s,
    )


def isotonic(values: Sequence[float]) -> tuple[float, ...]:
    """Return the nearest non-decreasing sequence in least squares, by averaging neighbours."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, size = value, 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean = (before * count + mean * size) / (count + size)
            size += count
        pools.append((mean, size))
    return tuple(mean for mean, size in pools for _ in range(size))


@lru_cache(maxsize=1024)
def _fit(values: tuple[float, ...], errors: tuple[float, ...]) -> tuple[CostReading, ...]:
    """Return monotone readings; each error is at least the adjustment of its value."""
    fitted = isotonic(values)
    if not errors:
        return tuple(map(CostReading, fitted))
    return tuple(
        CostReading(fit, max(error, abs(fit - value)))
        for fit, value, error in zip(fitted, values, errors, strict=True)
    )


def _check_sizes(name: str, sizes: Sequence[int]) -> None:
    if not sizes or any(b <= a for a, b in pairwise((0, *sizes))):
        raise ValueError(
            f"{name} is {list(sizes)}; it must be ascending from 1 or more and not empty"
        )


def _check_times(name: str, values: Iterable[float], *, allow_zero: bool = True) -> None:
    for value in values:
        if not (math.isfinite(value) and (value > 0.0 or (allow_zero and value == 0.0))):
            bound = "0 or more" if allow_zero else "above 0"
            raise ValueError(f"{name} contains {value} s; times are finite and {bound}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingCost:
    """Seconds of passes that read a prompt, by number of tokens and for both models.

    A verify pass of as many rows takes longer, for it yields logits at every row. Between
    measurements everything is linear; beyond the most tokens the last slope goes on.

    Attributes:
        tokens: measured numbers of tokens, ascending from 1.
    """

    tokens: tuple[int, ...]
    target_s: tuple[float, ...]
    draft_s: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse unequal lengths, unordered numbers and impossible times."""
        if not self.tokens or self.tokens[0] != 1 or any(b <= a for a, b in pairwise(self.tokens)):
            raise ValueError(f"tokens is {list(self.tokens)}; it must ascend from 1")
        for name in ("target_s", "draft_s"):
            times = getattr(self, name)
            if len(times) != len(self.tokens):
                raise ValueError(f"{name} has {len(times)} entries for {len(self.tokens)} numbers")
            if not all(0.0 <= seconds < math.inf for seconds in times):
                raise ValueError(f"{name} is {list(times)}; times are finite and 0 or more")

    def target_pass_s(self, num_tokens: int) -> float:
        """Return the seconds of a target pass that only reads a prompt."""
        return interpolate(self.tokens, [*map(CostReading, self.target_s)], num_tokens).s

    def target_more_s(self, num_tokens: int) -> float:
        """Return the seconds that reading adds to a target pass with other rows."""
        return max(0.0, self.target_pass_s(num_tokens) - self.target_s[0])

    def draft_more_s(self, num_tokens: int) -> float:
        """Return the seconds that reading these tokens adds to drafting."""
        read_s = interpolate(self.tokens, [*map(CostReading, self.draft_s)], num_tokens).s
        return max(0.0, read_s - self.draft_s[0])


Pick = Callable[[CostLine], CostReading]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Holds seconds per pass by rows per sequence, batch size and context length.

    A pass of batch B at K has B (K + 1) rows. Between measurements everything is linear in rows, in
    context and in batch.

    Outside them: rows as in `CostLine`. Beyond the longest context the last slope goes on, never
    downwards; below the shortest the shortest holds, and below the smallest batch the smallest.
    Beyond the largest batch a speculative cycle grows in proportion to the batch while the plain
    step goes on along its slope: an overestimate as well.
    """

    lines: tuple[CostLine, ...]

    def __post_init__(self) -> None:
        found = [(line.batch, line.context) for line in self.lines]
        wanted = [(batch, context) for batch in self.batches for context in self.contexts]
        if not found or sorted(found) != wanted:
            raise ValueError(
                f"cost lines at (batch, context) {found}; there must be one per pair of "
                f"batches {self.batches} and contexts {self.contexts}"
            )

    @property
    def batches(self) -> tuple[int, ...]:
        """Return the measured batch sizes, ascending."""
        return tuple(sorted({line.batch for line in self.lines}))

    @property
    def contexts(self) -> tuple[int, ...]:
        """Return the measured context lengths, ascending."""
        return tuple(sorted({line.context for line in self.lines}))

    def verify_step_s(self, num_rows: int, context: int = 0, batch: int = 1) -> float:
        """Return the seconds of a target pass over `num_rows` rows of each sequence."""
        return self._read_verify(num_rows, context, batch).s

    def plain_step_s(self, context: int = 0, batch: int = 1) -> float:
        return self._read_plain(context, batch).s

    def draft_token_s(self, context: int = 0, batch: int = 1) -> float:
        """Return the seconds that one more drafted token adds to a cycle."""
        return self._read_in_cycle(lambda line: line.draft, context, batch).s

    def cycle_s(self, num_speculative_tokens: int, context: int = 0, batch: int = 1) -> float:
        """Return the seconds of a speculative cycle at K, or of a plain step for K = 0."""
        kappa = self.cycle_cost(num_speculative_tokens, context, batch)
        return kappa * self.plain_step_s(context, batch)

    def verify_cost(self, num_rows: int, context: int = 0, batch: int = 1) -> float:
        """Return v(n), in plain steps."""
        return self.verify_step_s(num_rows, context, batch) / self.plain_step_s(context, batch)

    def draft_cost(self, context: int = 0, batch: int = 1) -> float:
        """Return c: the cost of one more drafted token, in plain steps."""
        return self.draft_token_s(context, batch) / self.plain_step_s(context, batch)

    def overhead_s(self, num_speculative_tokens: int, context: int = 0, batch: int = 1) -> float:
        """Return the seconds of a speculative cycle at K beyond drafting and the target pass."""
        return self._read_overhead(num_speculative_tokens, context, batch).s

    def overhead(self, num_speculative_tokens: int, context: int = 0, batch: int = 1) -> float:
        """Return o(K), in plain steps: the cycle beyond drafting and the target pass."""
        spent_s = self.overhead_s(num_speculative_tokens, context, batch)
        return spent_s / self.plain_step_s(context, batch)

    def cycle_cost(self, num_speculative_tokens: int, context: int = 0, batch: int = 1) -> float:
        """Return the cost of a cycle in plain steps: kappa = K c + v(K + 1) + o(K), 1 for K = 0."""
        if num_speculative_tokens == 0:
            return 1.0
        return cycle_cost(
            num_speculative_tokens,
            draft_cost=self.draft_cost(context, batch),
            verify_cost=self.verify_cost(num_speculative_tokens + 1, context, batch),
            overhead=self.overhead(num_speculative_tokens, context, batch),
        )

    def verify_cost_interval(self, num_rows: int, context: int = 0, batch: int = 1) -> Interval:
        """Return v(n) with its 95% interval."""
        verify = self._read_verify(num_rows, context, batch)
        return _divide(verify, self._read_plain(context, batch))

    def cycle_cost_interval(
        self, num_speculative_tokens: int, context: int = 0, batch: int = 1
    ) -> Interval:
        """Return kappa with its 95% interval; the errors of its parts are taken as independent."""
        if num_speculative_tokens == 0:
            return Interval(estimate=1.0, low=1.0, high=1.0)
        parts = (
            self._read_in_cycle(lambda line: line.draft, context, batch).times(
                num_speculative_tokens
            ),
            self._read_verify(num_speculative_tokens + 1, context, batch),
            self._read_overhead(num_speculative_tokens, context, batch),
        )
        return _divide(combine([1, 1, 1], parts), self._read_plain(context, batch))

    def _read_plain(self, context: int, batch: int) -> CostReading:
        return self._read_at(lambda line: line.plain, context, batch)

    def _read_verify(self, num_rows: int, context: int, batch: int) -> CostReading:
        if num_rows < 1:
            raise ValueError(f"num_rows is {num_rows}; a pass has at least 1 row")
        return self._read_in_cycle(lambda line: line.verify(num_rows), context, batch)

    def _read_overhead(self, num_speculative_tokens: int, context: int, batch: int) -> CostReading:
        if num_speculative_tokens < 1:
            raise ValueError(
                f"K is {num_speculative_tokens}; a speculative cycle drafts at least 1"
            )
        return self._read_in_cycle(
            lambda line: line.overhead(num_speculative_tokens), context, batch
        )

    def _read_in_cycle(self, pick: Pick, context: int, batch: int) -> CostReading:
        measured_batch = min(batch, self.batches[-1])
        return self._read_at(pick, context, measured_batch).times(batch / measured_batch)

    def _read_at(self, pick: Pick, context: int, batch: int) -> CostReading:
        """Interpolate between lines: linearly in context, then in batch."""
        if batch < 1:
            raise ValueError(f"batch is {batch}; it must be at least 1")
        contexts, batches = self.contexts, self.batches
        picked = {(line.batch, line.context): pick(line) for line in self.lines}
        at_context = [
            interpolate(contexts, [picked[b, c] for c in contexts], context) for b in batches
        ]
        return interpolate(batches, at_context, batch)


def _divide(spent: CostReading, plain: CostReading) -> Interval:
    estimate = spent.s / plain.s
    reach = math.hypot(spent.error_s, estimate * plain.error_s) / plain.s
    return Interval(estimate=estimate, low=max(0.0, estimate - reach), high=estimate + reach)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCosts:
    """Cost tables of one target and drafter, for greedy and for sampled drafts."""

    greedy: CostTable
    sampled: CostTable
    reading: ReadingCost | None = None

    def at(self, temperature: float) -> CostTable:
        """Return the table that holds at a temperature."""
        return self.greedy if temperature == 0 else self.sampled


def with_draft_cost(table: CostTable, draft_s: float, overhead_s: float | None = None) -> CostTable:
    """Return the cost tables of the same target with another drafter.

    Args:
        draft_s: seconds of every drafted token, at every batch size.
        overhead_s: seconds of a cycle beyond drafting and the pass, for every K and batch; None
            leaves those of the table.
    """
    changes: dict[str, Any] = {"draft_s": draft_s, "draft_error_s": 0.0}
    if overhead_s is not None:
        changes |= {"overhead_ks": (1,), "overhead_s": (overhead_s,), "overhead_error_s": ()}
    return CostTable(lines=tuple(replace(line, **changes) for line in table.lines))


def with_batches(table: CostTable, batches: Iterable[int]) -> CostTable:
    """Return a cost table extended to batch sizes beyond the largest measured one.

    The time of a pass depends little on which sequence a row belongs to. So n times the sequences
    are taken to cost what n times the rows of the largest measured batch cost, and a draft's pass
    to grow as the target's does. The time to read the keys and values of more sequences is left
    out, so large batches look faster than a measurement would show.
    """
    largest = table.batches[-1]
    wanted = sorted({batch for batch in batches if batch > largest})
    measured = [line for line in table.lines if line.batch == largest]
    return CostTable(
        lines=(*table.lines, *(grown(line, batch) for batch in wanted for line in measured))
    )


def grown(line: CostLine, batch: int) -> CostLine:
    """Estimate a line of the cost table at a larger batch size from its times by rows."""
    times = batch / line.batch
    passes = [line.verify(math.ceil(rows * times)) for rows in line.rows]
    factor = passes[0].s / line.verify(1).s
    return replace(
        line,
        batch=batch,
        verify_s=tuple(reading.s for reading in passes),
        verify_error_s=tuple(reading.error_s for reading in passes),
        plain_s=line.plain_s + passes[0].s - line.verify(1).s,
        draft_s=line.draft_s * factor,
        draft_error_s=line.draft_error_s * factor,
    )
