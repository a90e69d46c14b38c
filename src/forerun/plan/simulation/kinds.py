"""Distributions of arrival times, lengths and acceptance in a workload."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from forerun.errors import InvalidRequest, Range, check_ranges

SQRT_3 = math.sqrt(3.0)
"""Half the width of a uniform distribution over its standard deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """All requests arrive at time 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
    """Arrivals of a Poisson process.

    Attributes:
        rate_per_s: requests per second.
    """

    rate_per_s: float

    def __post_init__(self) -> None:
        check_ranges(self, Range("rate_per_s", 0, above_low=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bursty:
    """Bursts of requests that arrive together; the bursts are a Poisson process.

    Attributes:
        rate_per_s: requests per second, over all bursts.
        burst: requests per burst on average; sizes are geometric.
    """

    rate_per_s: float
    burst: float = 8.0

    def __post_init__(self) -> None:
        check_ranges(self, Range("rate_per_s", 0, above_low=True), Range("burst", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Arrival times taken from a list, for example of a trace.

    Attributes:
        times_s: seconds from the start, ascending; as many as there are requests.
    """

    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse times that are negative, not finite or out of order."""
        for number, time_s in enumerate(self.times_s, start=1):
            if not 0.0 <= time_s < math.inf:
                raise InvalidRequest(f"arrival {number} is at {time_s} s; it must be 0 or later")
        for number, (before, after) in enumerate(pairwise(self.times_s), start=2):
            if after < before:
                raise InvalidRequest(
                    f"arrival {number} at {after:g} s is before arrival {number - 1} at "
                    f"{before:g} s; sort them"
                )


Arrivals = Together | Poisson | Bursty | Recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """The same number of tokens for every request."""

    tokens: int

    def __post_init__(self) -> None:
        check_ranges(self, Range("tokens", 1, integer=True))

    @property
    def most(self) -> int:
        """Return the largest length."""
        return self.tokens

    @property
    def mean(self) -> float:
        """Return the mean length."""
        return self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """A uniformly distributed number of tokens from `least` to `most`."""

    least: int
    most: int

    def __post_init__(self) -> None:
        check_ranges(self, Range("least", 1, integer=True), Range("most", self.least, integer=True))

    @property
    def mean(self) -> float:
        """Return the mean length."""
        return (self.least + self.most) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """Lognormal lengths, many short and few long ones, cut at `most`.

    Attributes:
        median: median length.
        sigma: standard deviation of the logarithm.
        most: longest; without it a text might never end.
    """

    median: float
    sigma: float
    most: int

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        check_ranges(
            self,
            Range("median", 1),
            Range("sigma", 0, high=5),
            Range("most", 1, integer=True),
        )

    @property
    def mean(self) -> float:
        """Return the mean before the cut, which is an upper bound."""
        return min(self.most, self.median * math.exp(self.sigma**2 / 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """Lengths taken from a list, which is repeated where there are more requests."""

    values: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse an empty list and texts without a token."""
        if not self.values:
            raise InvalidRequest("a list of lengths is empty")
        for value in self.values:
            Range("a listed length", 1, integer=True).check(value)

    @property
    def most(self) -> int:
        """Return the largest length."""
        return max(self.values)

    @property
    def mean(self) -> float:
        """Return the mean length."""
        return sum(self.values) / len(self.values)


Lengths = Fixed | Uniform | Lognormal | Listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """The same acceptance probability at every position of every request."""

    alpha: float

    def __post_init__(self) -> None:
        check_ranges(self, Range("alpha", 0, high=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class PerPosition:
    """Acceptance rates per position (beta); the last conditional rate holds for later positions."""

    beta: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse values that rise or are outside [0, 1]."""
        if not self.beta:
            raise InvalidRequest("beta is empty; give one figure per drafted position")
        before = 1.0
        for position, value in enumerate(self.beta, start=1):
            if not 0.0 <= value <= before:
                raise InvalidRequest(
                    f"beta at position {position} is {value}; it must be in [0, {before:g}]"
                )
            before = value


@dataclass(frozen=True, slots=True, kw_only=True)
class Clustered:
    """An acceptance probability per request, uniformly distributed around the mean.

    Attributes:
        alpha: their mean.
        spread: their standard deviation.
    """

    alpha: float
    spread: float

    def __post_init__(self) -> None:
        """Refuse alphas outside [0, 1]."""
        check_ranges(self, Range("alpha", 0, high=1), Range("spread", 0))
        reach = SQRT_3 * self.spread
        if self.alpha - reach < 0.0 or self.alpha + reach > 1.0:
            most = min(self.alpha, 1.0 - self.alpha) / SQRT_3
            raise InvalidRequest(
                f"spread is {self.spread}; around {self.alpha} it is at most {most:.3f}, "
                "or some alpha would be no probability"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drifting:
    """An acceptance probability that changes linearly from `start` to `end` over the requests."""

    start: float
    end: float

    def __post_init__(self) -> None:
        check_ranges(self, Range("start", 0, high=1), Range("end", 0, high=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptancePart:
    """The acceptance and weight of one component of a mixture.

    Attributes:
        tag: tag of the kind, which a controller receives.
        weight: number of its requests, relative to the other parts.
        acceptance: acceptance of the kind.
    """

    tag: str
    weight: float
    acceptance: Acceptance

    def __post_init__(self) -> None:
        check_ranges(self, Range("weight", 0, above_low=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """A mixture of requests with different acceptance, in random order."""

    parts: tuple[AcceptancePart, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise InvalidRequest("a mixture has no parts")


Acceptance = Constant | PerPosition | Clustered | Drifting | Mixed
