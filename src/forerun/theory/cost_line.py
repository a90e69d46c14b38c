"""One line of a cost table: measured times at one batch size and one context length."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from typing import NamedTuple


class CostReading(NamedTuple):
    """A time and half the width of its 95% interval, which is 0 where it is not known."""

    s: float
    error_s: float = 0.0

    def times(self, factor: float) -> CostReading:
        """Return both values multiplied by a factor."""
        return CostReading(self.s * factor, self.error_s * factor)


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
    _fitted: tuple[CostReading, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the measurements and fit monotone times to them."""
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
        object.__setattr__(self, "_fitted", _fit(self.verify_s, self.verify_error_s))

    def verify(self, num_rows: int) -> CostReading:
        """Return the time of a target pass over `num_rows` rows of each sequence."""
        measured_rows = min(num_rows, self.rows[-1])
        fitted = interpolate(self.rows, self._fitted, measured_rows)
        return fitted.times(num_rows / measured_rows)

    @property
    def plain(self) -> CostReading:
        """Return the time of a plain decode step."""
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

    def to_dict(self) -> dict[str, object]:
        """Return the measured fields by name, ready for JSON."""
        return {name: value for name, value in asdict(self).items() if name in _names()}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> CostLine:
        """Return the line that `to_dict` wrote; sequences may be tuples or lists.

        Raises:
            ValueError: a field is missing, unknown or not of numbers, or the line is malformed.
        """
        if missing := _names() - values.keys():
            raise ValueError(f"a cost line lacks {', '.join(sorted(missing))}")
        if unknown := values.keys() - _names():
            raise ValueError(f"a cost line has unknown fields {', '.join(sorted(unknown))}")
        return cls(
            batch=_integers("batch", [values["batch"]])[0],
            context=_integers("context", [values["context"]])[0],
            rows=_integers("rows", values["rows"]),
            verify_s=numbers("verify_s", values["verify_s"]),
            verify_error_s=numbers("verify_error_s", values["verify_error_s"]),
            overhead_ks=_integers("overhead_ks", values["overhead_ks"]),
            overhead_s=numbers("overhead_s", values["overhead_s"]),
            overhead_error_s=numbers("overhead_error_s", values["overhead_error_s"]),
            **{name: numbers(name, [values[name]])[0] for name in _SCALARS},
        )

    def _check_lengths(self, sizes: str, times: str, errors: str) -> None:
        wanted = len(getattr(self, sizes))
        for name in (times, errors) if getattr(self, errors) else (times,):
            if (found := len(getattr(self, name))) != wanted:
                raise ValueError(
                    f"{name} has {found} entries; it needs {wanted}, as many as {sizes}"
                )


_SCALARS = ("plain_s", "draft_s", "plain_error_s", "draft_error_s")


def _names() -> set[str]:
    return {entry.name for entry in fields(CostLine) if entry.init}


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


def numbers(name: str, values: object) -> tuple[float, ...]:
    if not isinstance(values, list | tuple):
        raise ValueError(f"{name} is {values!r}; it must be a list")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} contains {value!r}; it must be a number")
    return tuple(map(float, values))


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


def _fit(values: Sequence[float], errors: Sequence[float]) -> tuple[CostReading, ...]:
    """Return monotone readings; each error is at least the adjustment of its value.

    Without errors the readings have none: the size of the noise is not known then.
    """
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


def _integers(name: str, values: object) -> tuple[int, ...]:
    found = numbers(name, values)
    if any(number != int(number) for number in found):
        raise ValueError(f"{name} is {values!r}; it must hold whole numbers")
    return tuple(map(int, found))
