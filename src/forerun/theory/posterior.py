"""Discounted posteriors of draft acceptance per position, learnt during decoding.

A position enters where everything before it was accepted and the plan allowed it. What was not
allowed is unobserved. Where a stop rule ended a draft, the next position was allowed and not
passed: so the survival at K is that of drafting under that rule, which is what a decision about K
under the same rule needs; whether the draft would have been right there is not observed.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.theory.drift import DriftingRate, Memory

__all__ = ["Passing", "Prospects"]


class Passing:
    """Estimates of P(position i passed | i - 1 passed and i allowed), for every i.

    Args:
        memory: of each position.
        strength: trials that what is believed before any observation is worth.
    """

    __slots__ = ("_means", "memory", "rates", "strength")

    def __init__(self, memory: Memory, strength: float) -> None:
        self.memory = memory
        self.strength = strength
        self.rates: list[DriftingRate] = []
        self._means: dict[tuple[float, int], list[float]] = {}

    def observe(self, num_allowed: int, num_passed: int) -> None:
        """Count one step; a change at a position lowers the weight of the positions behind it.

        Args:
            num_allowed: positions the plan allowed.
            num_passed: how many of them were passed, from the first on.
        """
        rates = self.rates
        num_reached = min(num_allowed, num_passed + 1)
        while len(rates) < num_reached:
            rates.append(DriftingRate(self.memory))
        for index in range(num_reached):
            if rates[index].observe(index < num_passed):
                for behind in rates[index + 1 :]:
                    behind.shorten()
        self._means.clear()

    def fade(self, share: float) -> None:
        """Multiply the weight of all observations by a share, at every position."""
        for rate in self.rates:
            rate.fade(share)
        self._means.clear()

    def means(self, prior: float, num_positions: int) -> list[float]:
        """Posterior means; a position without observations takes the mean of the one before it."""
        asked = (prior, num_positions)
        if asked in self._means:
            return self._means[asked]
        found: list[float] = []
        mean, strength, rates = prior, self.strength, self.rates
        for index in range(num_positions):
            if index < len(rates):
                mean = rates[index].mean(mean, strength)
            found.append(mean)
        self._means[asked] = found
        return found

    def means_given(self, priors: Sequence[float]) -> list[float]:
        """Return posterior means with a prior mean given for every position."""
        strength = self.strength
        seen = zip(self.rates, priors, strict=False)
        found = [(rate.wins + prior * strength) / (rate.trials + strength) for rate, prior in seen]
        return [*found, *priors[len(found) :]]


class Prospects:
    """Acceptance and depth of drafts under one method and stop rule.

    Args:
        memory: of every rate.
        strength: trials that the prior is worth.
    """

    __slots__ = ("accepted", "drafted")

    def __init__(self, memory: Memory, strength: float) -> None:
        self.accepted = Passing(memory, strength)
        self.drafted = Passing(memory, strength)

    def observe(self, k_budget: int, depth_drafted: int, num_accepted: int) -> None:
        """Count one step that was allowed `k_budget` positions, which must be at least 1."""
        self.accepted.observe(k_budget, num_accepted)
        if depth_drafted < k_budget or self.drafted.rates:  # else all that is allowed is drafted
            self.drafted.observe(k_budget, depth_drafted)

    def fade(self, share: float) -> None:
        """Multiply the weight of all observations by a share."""
        self.accepted.fade(share)
        self.drafted.fade(share)
