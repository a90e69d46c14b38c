"""Estimate of a changing rate: a long memory, shortened when a short memory contradicts it.

The idea of ADWIN (Bifet and Gavalda 2007) with two exponential windows instead of all cuts of one:
where the means of the two differ by more than chance, what lies further back is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DriftingRate", "Memory"]

LEAST_RECENT = 3.0
"""Recent observations without which nothing is called a change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Settings of the weights of past observations.

    Attributes:
        slow: what is left of an observation's weight after one more; 1 / (1 - slow) count in all.
        fast: the same of the short memory.
        surprise: standard errors between the two that count as a change.

    Raises:
        ValueError: not 0 < fast < slow < 1, or no positive surprise.
    """

    slow: float = 0.98
    fast: float = 0.85
    surprise: float = 3.0

    def __post_init__(self) -> None:
        """Refuse weights that are out of order."""
        if not 0.0 < self.fast < self.slow < 1.0 or not self.surprise > 0.0:
            raise ValueError(f"{self}: it takes 0 < fast < slow < 1 and a positive surprise")


class DriftingRate:
    """Estimates the share of successes among recent trials.

    Args:
        memory: how far back "recent" goes.
    """

    __slots__ = ("fast_trials", "fast_wins", "memory", "num_changes", "trials", "wins")

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.trials = self.wins = 0.0
        self.fast_trials = self.fast_wins = 0.0
        self.num_changes = 0

    def observe(self, success: bool) -> bool:
        """Count one trial, and return whether the rate has changed."""
        memory = self.memory
        self.trials = self.trials * memory.slow + 1.0
        self.fast_trials = self.fast_trials * memory.fast + 1.0
        self.wins *= memory.slow
        self.fast_wins *= memory.fast
        if success:
            self.wins += 1.0
            self.fast_wins += 1.0
        if not self._has_changed():
            return False
        self.shorten()
        self.num_changes += 1
        return True

    def shorten(self) -> None:
        """Forget everything but the short memory."""
        self.trials, self.wins = self.fast_trials, self.fast_wins

    def mean(self, prior: float, strength: float) -> float:
        """Return the estimated rate, with `prior` weighted as `strength` trials."""
        return (self.wins + prior * strength) / (self.trials + strength)

    def _has_changed(self) -> bool:
        """Return whether short memory and older trials differ significantly."""
        recent = self.fast_trials
        before = self.trials - recent
        if recent < LEAST_RECENT or before < LEAST_RECENT:
            return False
        gap = self.fast_wins / recent - (self.wins - self.fast_wins) / before
        share = (self.wins + 0.5) / (self.trials + 1.0)
        # A mean under exponential weights of sum n varies as one of 2 n - 1 equal trials.
        variance = share * (1.0 - share) * (1.0 / (2.0 * recent - 1.0) + 1.0 / (2.0 * before - 1.0))
        return gap * gap > self.memory.surprise**2 * variance
