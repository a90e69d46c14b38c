"""What the comparison measures, and the figures computed from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forerun.theory.intervals import Interval, bootstrap_ratio

__all__ = ["OURS", "Cell", "Choice", "Figures", "Sample", "Series", "figures"]

OURS = "forerun"
LEAST_ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Which arm, how many prompts at once."""

    arm: str
    batch: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One call of one peer.

    Attributes:
        round: samples of one round and cell continue the same prompts.
        seconds: wall time inside the worker, prefill included.
        tokens: what was emitted, per prompt.
    """

    round: int
    seconds: float
    tokens: list[list[int]]

    @property
    def num_tokens(self) -> int:
        """Emitted tokens."""
        return sum(map(len, self.tokens))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The K of one peer at one batch size, chosen on prompts that are not measured afterwards.

    Attributes:
        best: the fastest.
        tokens_per_s: of every K that was tried, prefill included.
    """

    peer: str
    batch: int
    best: int
    tokens_per_s: dict[int, float]


@dataclass(kw_only=True)
class Series:
    """One peer in one cell: samples by round, and why there are no more of them, if so."""

    samples: dict[int, Sample] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One peer in one cell.

    Attributes:
        tokens_per_s: prefill included, over all rounds; None where too few were measured.
        ours_over_peer: paired by round; None for ourselves and where we were not measured.
        same_tokens: share of positions with our token, of the same arm.
        failure: what went wrong, if something did.
    """

    tokens_per_s: Interval | None
    ours_over_peer: Interval | None
    same_tokens: float | None
    failure: str | None


def figures(peer: str, cell: Cell, found: Mapping[tuple[str, Cell], Series]) -> Figures:
    """Figures of one peer in one cell beside ours in the same rounds."""
    series, ours = found[peer, cell], found.get((OURS, cell), Series())
    own = list(series.samples.values())
    pairs = [(s, ours.samples[s.round]) for s in own if s.round in ours.samples]
    compared = peer != OURS and len(pairs) >= LEAST_ROUNDS
    return Figures(
        tokens_per_s=rate(own) if len(own) >= LEAST_ROUNDS else None,
        ours_over_peer=ratio(pairs) if compared else None,
        same_tokens=same_tokens(pairs) if compared else None,
        failure=series.failure,
    )


def rate(samples: Sequence[Sample]) -> Interval:
    """Tokens per second."""
    return bootstrap_ratio([s.num_tokens for s in samples], [s.seconds for s in samples], seed=0)


def ratio(pairs: Sequence[tuple[Sample, Sample]]) -> Interval:
    """Our tokens per second over the peer's: both emit equally many."""
    return bootstrap_ratio([p.seconds for p, _ in pairs], [o.seconds for _, o in pairs], seed=0)


def same_tokens(pairs: Sequence[tuple[Sample, Sample]]) -> float:
    """Share of positions at which both emitted the same token.

    Once two texts part they hardly meet again: one near tie early on costs the rest.
    """
    equal = [
        a == b
        for peer, ours in pairs
        for theirs, own in zip(peer.tokens, ours.tokens, strict=True)
        for a, b in zip(theirs, own, strict=True)
    ]
    return sum(equal) / len(equal)
