"""How far a copy is trusted: hit rates by match length, learnt while a request runs."""

from __future__ import annotations

__all__ = ["HitRates"]

PRIOR = (0.0, 0.15, 0.35, 0.55, 0.7, 0.85, 0.95)
"""Rates before anything is known, for matches of 0, 1, 2-3, 4-7, 8-15, 16-31 and more tokens.

Between those of prose and of repeated edits, near those of code: benchmarks/suffix.
"""
LONGEST = len(PRIOR) - 1
SPEED = 1 / 8
"""Weight of the latest observation."""


class HitRates:
    """Of what the frequencies in a text promise, how much comes true, by length of the match.

    Every token of the output is an observation, whether it was drafted or not, so a request that
    starts to copy is noticed while nothing is drafted.
    """

    __slots__ = ("_rates",)

    def __init__(self) -> None:
        self._rates = list(PRIOR)

    def probability(self, length: int, share: float) -> float:
        """That the favourite after a match is what comes next.

        Args:
            length: tokens of the match.
            share: of its occurrences that went on that way.
        """
        return self._rates[min(LONGEST, length.bit_length())] * share

    def observe(self, length: int, share: float, hit: bool) -> None:
        """Move the rate towards where `share` times rate is what happened."""
        bucket = min(LONGEST, length.bit_length())
        rate = self._rates[bucket]
        self._rates[bucket] = min(1.0, max(0.0, rate + SPEED * (hit - rate * share)))
