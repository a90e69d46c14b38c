"""The cost table: measured times of drafting and verifying, and what lies between them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise

from forerun.theory.speedup import cycle_cost

__all__ = ["CostTable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Seconds per pass, by rows of the target pass and by context length.

    Between measurements: linear in rows and in context. Noise can make more rows look cheaper than
    fewer; the rows of each context are read through their isotonic fit, so v never falls.

    Outside them: beyond the most rows the pass grows in proportion to rows, the dear side, so that
    a K nobody measured is not chosen for looking free. Beyond the longest context the last slope
    goes on, never downwards; below the shortest the shortest holds.

    Attributes:
        rows: measured row counts, ascending from 1.
        contexts: measured context lengths, ascending; one entry where context was not varied.
        verify_s: target pass: per context, seconds per row count.
        plain_s: a whole plain decode step, per context.
        draft_s: one drafted token, per context.
        overhead_s: what a speculative cycle takes beyond drafting and the pass.

    Raises:
        ValueError: lengths disagree, an order is broken, or a time is negative, zero or not finite.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...] = (0,)
    verify_s: tuple[tuple[float, ...], ...]
    plain_s: tuple[float, ...]
    draft_s: tuple[float, ...]
    overhead_s: float = 0.0
    _fitted_s: tuple[tuple[float, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Validate and fit."""
        _check_ascending("rows", self.rows, first=1)
        _check_ascending("contexts", self.contexts)
        for name in ("verify_s", "plain_s", "draft_s"):
            _check_length(name, getattr(self, name), len(self.contexts), "context")
        for line in self.verify_s:
            _check_length("a line of verify_s", line, len(self.rows), "row count")
            _check_times("verify_s", line, allow_zero=False)
        _check_times("plain_s", self.plain_s, allow_zero=False)
        _check_times("draft_s", self.draft_s, allow_zero=True)
        _check_times("overhead_s", [self.overhead_s], allow_zero=True)
        object.__setattr__(self, "_fitted_s", tuple(map(_isotonic, self.verify_s)))

    def verify_step_s(self, num_rows: int, context: int = 0) -> float:
        """Seconds of a target pass over `num_rows` rows at a context of `context` tokens."""
        if num_rows < 1:
            raise ValueError(f"num_rows is {num_rows}; a pass has at least 1 row")
        measured_rows = min(num_rows, self.rows[-1])
        at_rows = [_interpolate(self.rows, line, measured_rows) for line in self._fitted_s]
        return _interpolate(self.contexts, at_rows, context) * (num_rows / measured_rows)

    def plain_step_s(self, context: int = 0) -> float:
        """Seconds of a plain decode step."""
        return _interpolate(self.contexts, self.plain_s, context)

    def draft_token_s(self, context: int = 0) -> float:
        """Seconds of drafting one token."""
        return _interpolate(self.contexts, self.draft_s, context)

    def cycle_s(self, num_speculative_tokens: int, context: int = 0) -> float:
        """Seconds of a speculative cycle at K; of a plain step for K = 0."""
        return self.cycle_cost(num_speculative_tokens, context) * self.plain_step_s(context)

    def verify_cost(self, num_rows: int, context: int = 0) -> float:
        """v(n), in plain steps."""
        return self.verify_step_s(num_rows, context) / self.plain_step_s(context)

    def draft_cost(self, context: int = 0) -> float:
        """c: one drafted token, in plain steps."""
        return self.draft_token_s(context) / self.plain_step_s(context)

    def overhead(self, context: int = 0) -> float:
        """o: the rest of a speculative cycle, in plain steps."""
        return self.overhead_s / self.plain_step_s(context)

    def cycle_cost(self, num_speculative_tokens: int, context: int = 0) -> float:
        """kappa = K c + v(K + 1) + o; 1 for K = 0, which is plain decoding."""
        if num_speculative_tokens == 0:
            return 1.0
        return cycle_cost(
            num_speculative_tokens,
            draft_cost=self.draft_cost(context),
            verify_cost=self.verify_cost(num_speculative_tokens + 1, context),
            overhead=self.overhead(context),
        )

    def to_dict(self) -> dict[str, object]:
        """JSON-ready fields by name, as measured."""
        return {name: value for name, value in asdict(self).items() if name in _names()}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> CostTable:
        """The table `to_dict` wrote, tuples or lists alike.

        Raises:
            ValueError: a field is missing, unknown or not of numbers, or the table is malformed.
        """
        if missing := _names() - values.keys():
            raise ValueError(f"cost table lacks {', '.join(sorted(missing))}")
        if unknown := values.keys() - _names():
            raise ValueError(f"cost table has unknown fields {', '.join(sorted(unknown))}")
        lines = _sequence("verify_s", values["verify_s"])
        (overhead_s,) = _numbers("overhead_s", [values["overhead_s"]])
        return cls(
            rows=_integers("rows", values["rows"]),
            contexts=_integers("contexts", values["contexts"]),
            verify_s=tuple(_numbers("a line of verify_s", line) for line in lines),
            plain_s=_numbers("plain_s", values["plain_s"]),
            draft_s=_numbers("draft_s", values["draft_s"]),
            overhead_s=overhead_s,
        )


def _names() -> set[str]:
    return {entry.name for entry in fields(CostTable) if entry.init}


def _interpolate(xs: Sequence[int], ys: Sequence[float], x: int) -> float:
    """Piecewise linear; constant before the first point, after the last its slope if rising."""
    if len(xs) == 1 or x <= xs[0]:
        return ys[0]
    left = min(bisect_right(xs, x) - 1, len(xs) - 2)
    slope = (ys[left + 1] - ys[left]) / (xs[left + 1] - xs[left])
    if x > xs[-1]:
        return ys[-1] + max(slope, 0.0) * (x - xs[-1])
    return ys[left] + slope * (x - xs[left])


def _isotonic(values: Sequence[float]) -> tuple[float, ...]:
    """The nearest non-decreasing sequence in least squares: neighbours that fall are averaged."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, size = value, 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean = (before * count + mean * size) / (count + size)
            size += count
        pools.append((mean, size))
    return tuple(mean for mean, size in pools for _ in range(size))


def _check_ascending(name: str, values: Sequence[int], first: int | None = None) -> None:
    if not values or any(b <= a for a, b in pairwise(values)):
        raise ValueError(f"{name} is {list(values)}; it must be ascending and not empty")
    if first is not None and values[0] != first:
        raise ValueError(f"{name} is {list(values)}; it must begin at {first}")


def _check_length(name: str, values: Sequence[object], length: int, per: str) -> None:
    if len(values) != length:
        raise ValueError(f"{name} has {len(values)} entries; it needs {length}, one per {per}")


def _check_times(name: str, values: Iterable[float], *, allow_zero: bool) -> None:
    for value in values:
        if not (math.isfinite(value) and (value > 0.0 or (allow_zero and value == 0.0))):
            bound = "0 or more" if allow_zero else "above 0"
            raise ValueError(f"{name} contains {value} s; times are finite and {bound}")


def _sequence(name: str, values: object) -> Sequence[object]:
    if not isinstance(values, list | tuple):
        raise ValueError(f"{name} is {values!r}; it must be a list")
    return values


def _numbers(name: str, values: object) -> tuple[float, ...]:
    numbers = []
    for value in _sequence(name, values):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} contains {value!r}; it must be a number")
        numbers.append(float(value))
    return tuple(numbers)


def _integers(name: str, values: object) -> tuple[int, ...]:
    numbers = _numbers(name, values)
    if any(number != int(number) for number in numbers):
        raise ValueError(f"{name} is {values!r}; it must hold whole numbers")
    return tuple(map(int, numbers))
