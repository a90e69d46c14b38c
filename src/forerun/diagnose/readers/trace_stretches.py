"""Acceptance by stretch (consecutive steps of a request), and comparison of groups of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

MIN_REQUESTS = 8
STRETCH_STEPS = 64
"""Of a request where there are few of them: after so many steps its text has moved on."""
OUTCOMES = ("none", "partial", "full")
NO_RECENT_PAUSE, AFTER_PAUSE = "no_recent_pause", "after_pause"
PAUSES = (NO_RECENT_PAUSE, AFTER_PAUSE)
"""What came before a drafting step: only drafting steps for a while, or a plain step."""
NO_PLACE = -1
MIN_NEIGHBOURS = 3
"""Of a stretch, to say what the others of a step are like."""

Ints: TypeAlias = npt.NDArray[np.int64]
Reals: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StretchCounts:
    """Drafting steps counted by stretch and by value of one property of the steps.

    Attributes:
        total: sum over them of the share of their draft that the verifier expected to accept.
        squares: sum of its squares.
    """

    stretch: Ints
    place: Ints
    num_steps: Reals
    num_first: Reals
    total: Reals
    squares: Reals

    @classmethod
    def joined(cls, parts: Sequence[StretchCounts]) -> StretchCounts:
        return cls(
            **{
                name: np.concatenate([getattr(part, name) for part in parts])
                for name in cls.__dataclass_fields__
            }
        )


EMPTY = StretchCounts(
    stretch=np.zeros(0, np.int64),
    place=np.zeros(0, np.int64),
    num_steps=np.zeros(0),
    num_first=np.zeros(0),
    total=np.zeros(0),
    squares=np.zeros(0),
)


@dataclass(slots=True, kw_only=True)
class Stretches:
    """Counts of drafting steps by stretch, for each property that is compared."""

    request_ids: list[str] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)
    parts: dict[str, list[StretchCounts]] = field(default_factory=dict)

    def add(self, drafting: pa.Table) -> None:
        """Count a block of drafting steps, ordered by request and step."""
        stretch, first = _stretch_of(drafting)
        share = _expected_share(drafting)
        accepted = (column(drafting, "num_accepted") > 0).astype(np.float64)
        rows = column(drafting, "batch_rows") // (column(drafting, "depth_drafted") + 1)
        around, outcome = _against_others(drafting, stretch, share)
        for name, place, values in (
            ("all", np.zeros_like(stretch), share),
            ("previous", outcome, around),
            ("paused", codes(drafting, "paused", PAUSES), share),
            ("context", bucket(column(drafting, "context_tokens")), share),
            ("index", bucket(column(drafting, "step")), share),
            ("company", (rows >= 2).astype(np.int64), share),
        ):
            counted = counts(stretch + len(self.request_ids), place, accepted, values)
            self.parts.setdefault(name, []).append(counted)
        self.request_ids += drafting["request_id"].take(pa.array(first)).to_pylist()
        self.starts_s += drafting["t_s"].take(pa.array(first)).to_pylist()

    def by(self, name: str) -> StretchCounts:
        return StretchCounts.joined(self.parts.get(name, [EMPTY]))


def column(table: pa.Table, name: str) -> Ints:
    found: Ints = table[name].to_numpy().astype(np.int64)
    return found


def codes(table: pa.Table, name: str, words: Sequence[str]) -> Ints:
    indices = pc.fill_null(pc.index_in(table[name], value_set=pa.array(words)), NO_PLACE)
    found: Ints = indices.to_numpy().astype(np.int64)
    return found


def bucket(values: Ints) -> Ints:
    """Return the base-4 logarithm of each value plus 1, rounded down."""
    found: Ints = np.floor(np.log2(values + 1.0) / 2.0).astype(np.int64)
    return found


def _stretch_of(drafting: pa.Table) -> tuple[Ints, Ints]:
    names = drafting["request_id"].combine_chunks().dictionary_encode()
    request = names.indices.to_numpy()
    part = column(drafting, "step") // STRETCH_STEPS
    if len(names.dictionary) >= MIN_REQUESTS:
        part = np.zeros_like(part)
    begins = np.ones(len(part), np.bool_)
    begins[1:] = (request[1:] != request[:-1]) | (part[1:] != part[:-1])
    return np.cumsum(begins) - 1, np.flatnonzero(begins)


def _expected_share(drafting: pa.Table) -> Reals:
    """Return the expected accepted share of each draft, corrected for the draft's depth.

    The expectation is over the verifier's own draws, so it scatters less than what was accepted. A
    deeper draft has a lower share of the same text; that is taken off.
    """
    depth = column(drafting, "depth_drafted")
    expected = drafting["expected_accepted"].to_numpy().astype(np.float64)
    share: Reals = np.minimum(1.0, expected / depth)
    means = np.bincount(depth, share) / np.maximum(1.0, np.bincount(depth))
    levelled: Reals = share + share.mean() - means[depth]
    return levelled


def _against_others(drafting: pa.Table, stretch: Ints, share: Reals) -> tuple[Reals, Ints]:
    """Return each share minus the mean of its stretch's other steps, and the previous outcomes.

    Where steps of a stretch come in any order, the one after a certain step is one of the others.
    So its share is held against theirs, without that step: a stretch that begins well would
    otherwise seem to fall off (Miller and Sanjurjo 2018).
    """
    before = np.roll(share, 1)
    known = np.zeros(len(stretch), np.bool_)
    known[1:] = stretch[1:] == stretch[:-1]
    num_steps = np.bincount(stretch)[stretch]
    known &= num_steps >= MIN_NEIGHBOURS
    others = (np.bincount(stretch, share)[stretch] - before) / np.maximum(1, num_steps - 1)
    outcome = np.where(known, codes(drafting, "previous", OUTCOMES), NO_PLACE)
    return share - others, outcome


def counts(stretch: Ints, place: Ints, accepted: Reals, values: Reals) -> StretchCounts:
    """Count steps by stretch and property value; steps without a value are left out."""
    used = place != NO_PLACE
    stretch, place, accepted, values = (a[used] for a in (stretch, place, accepted, values))
    width = int(place.max(initial=0)) + 1
    pairs, index = np.unique(stretch * width + place, return_inverse=True)
    size = len(pairs)
    return StretchCounts(
        stretch=pairs // width,
        place=pairs % width,
        num_steps=np.bincount(index, minlength=size).astype(np.float64),
        num_first=summed(index, accepted, size),
        total=summed(index, values, size),
        squares=summed(index, values * values, size),
    )


def summed(index: Ints, values: Reals, size: int) -> Reals:
    return np.bincount(index, values, size).astype(np.float64)


MIN_STEPS = 40
MIN_STRETCHES = 4
"""On either side; from fewer it cannot be told how much stretches differ anyway."""
NO_FALL = 0.1
"""Of the draft: a difference that is surely smaller is none."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Counts and mean acceptance of one of the two groups of steps in a `Comparison`.

    Attributes:
        mean: of their shares; of what they exceed others by, where those are compared.
    """

    num_steps: int
    num_stretches: int
    mean: float
    num_first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The difference of acceptance between two groups of steps."""

    high: Side
    low: Side
    error: float
    freedom: float

    @property
    def difference(self) -> float:
        return self.high.mean - self.low.mean

    @property
    def t(self) -> float:
        return self.difference / self.error if self.error > 0.0 else math.inf * self.difference

    def is_lower(self, least: float, chance: float) -> bool | None:
        """Whether acceptance is lower in the second group; None if the test does not decide it."""
        if self.difference >= least and self.t >= student_quantile(1.0 - chance, self.freedom):
            return True
        return False if self.difference + 2.0 * self.error < NO_FALL else None


def compare(places: StretchCounts, high: Mask, low: Mask) -> Comparison | None:
    """Compare two groups of steps; None where either has too few.

    The error is the larger of two: by the scatter between stretches, which is right however steps
    of one hang together but vague where there are few, and by that between steps.
    """
    sides = [_side_of(places, mask) for mask in (high, low)]
    if any(s.num_steps < MIN_STEPS or s.num_stretches < MIN_STRETCHES for s in sides):
        return None
    spread: list[float] = []
    shifts: list[Reals] = []
    num_stretches = int(places.stretch.max()) + 1
    for side, mask in zip(sides, (high, low), strict=True):
        num_steps, total = places.num_steps[mask], places.total[mask]
        shift = (total - num_steps * side.mean) / side.num_steps
        shifts.append(summed(places.stretch[mask], shift, num_stretches))
        variance = places.squares[mask].sum() / side.num_steps - side.mean**2
        spread.append(max(0.0, float(variance)) / side.num_steps)
    num = [side.num_stretches for side in sides]
    parts = [float((s**2).sum()) * n / (n - 1) for s, n in zip(shifts, num, strict=True)]
    between = sum(parts) - 2.0 * float((shifts[0] * shifts[1]).sum())
    # Welch and Satterthwaite; with fewer stretches on a side it counts for less.
    freedom = sum(parts) ** 2 / max(
        1e-300, sum(part**2 / (n - 1) for part, n in zip(parts, num, strict=True))
    )
    return Comparison(
        high=sides[0],
        low=sides[1],
        error=math.sqrt(max(0.0, between, sum(spread))),
        freedom=max(1.0, freedom),
    )


def ends(places: StretchCounts) -> Comparison | None:
    """Compare long contexts with short ones, divided so that both groups are large."""
    best: tuple[float, Mask] | None = None
    for cut in np.unique(places.place)[1:]:
        short: Mask = places.place < cut
        size = min(places.num_steps[short].sum(), places.num_steps[~short].sum())
        if best is None or size > best[0]:
            best = size, short
    return None if best is None else compare(places, best[1], ~best[1])


def _side_of(places: StretchCounts, mask: Mask) -> Side:
    """Compute the counts and the mean acceptance of one group of steps."""
    num_steps = int(places.num_steps[mask].sum())
    return Side(
        num_steps=num_steps,
        num_stretches=len(np.unique(places.stretch[mask])),
        mean=float(places.total[mask].sum()) / max(1, num_steps),
        num_first=int(places.num_first[mask].sum()),
    )


def student_quantile(probability: float, freedom: float) -> float:
    """Return a quantile of Student's t (Cornish-Fisher), slightly low below four degrees."""
    z = NormalDist().inv_cdf(probability)
    first = (z**3 + z) / (4.0 * freedom)
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / (96.0 * freedom**2)
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / (384.0 * freedom**3)
    return z + first + second + third
