"""Whether acceptance is lower at some places than at others, and how sure that is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from forerun.diagnose.readers.trace.stretches import Places, Reals, summed

__all__ = ["Comparison", "compare"]

MIN_STEPS = 40
MIN_STRETCHES = 4
"""On either side; from fewer it cannot be told how much stretches differ anyway."""
NO_FALL = 0.1
"""Of the draft: a difference that is surely smaller is none."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Steps of one side.

    Attributes:
        num_steps: how many.
        num_stretches: that they are from.
        mean: of their shares; of what they exceed others by, where those are compared.
        num_first: those that accepted at least one token.
    """

    num_steps: int
    num_stretches: int
    mean: float
    num_first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two sides and what lies between them.

    Attributes:
        high: where acceptance may be higher.
        low: where it may be lower.
        error: standard error of the difference of their means.
        freedom: degrees of freedom of that error.
    """

    high: Side
    low: Side
    error: float
    freedom: float

    @property
    def difference(self) -> float:
        """Of the means."""
        return self.high.mean - self.low.mean

    @property
    def t(self) -> float:
        """The difference in standard errors."""
        return self.difference / self.error if self.error > 0.0 else math.inf * self.difference

    def is_lower(self, least: float, chance: float) -> bool | None:
        """Whether the second side is lower; None where that is open.

        Args:
            least: difference that matters.
            chance: how often one that is not there may be seen.
        """
        if self.difference >= least and self.t >= student_quantile(1.0 - chance, self.freedom):
            return True
        return False if self.difference + 2.0 * self.error < NO_FALL else None


def compare(places: Places, high: Mask, low: Mask) -> Comparison | None:
    """Two sets of entries; None where there are too few on either side.

    The error is the larger of two: by the scatter between stretches, which is right however steps
    of one hang together but vague where there are few, and by that between steps.
    """
    sides = [side_of(places, mask) for mask in (high, low)]
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


def side_of(places: Places, mask: Mask) -> Side:
    """The entries of one side."""
    num_steps = int(places.num_steps[mask].sum())
    return Side(
        num_steps=num_steps,
        num_stretches=len(np.unique(places.stretch[mask])),
        mean=float(places.total[mask].sum()) / max(1, num_steps),
        num_first=int(places.num_first[mask].sum()),
    )


def student_quantile(probability: float, freedom: float) -> float:
    """Of Student's t, by the expansion of Cornish and Fisher; a little low below four degrees.

    Args:
        probability: above one half.
        freedom: degrees.
    """
    z = NormalDist().inv_cdf(probability)
    first = (z**3 + z) / (4.0 * freedom)
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / (96.0 * freedom**2)
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / (384.0 * freedom**3)
    return z + first + second + third
