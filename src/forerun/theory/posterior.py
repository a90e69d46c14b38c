"""Discounted posteriors of acceptance per draft position, updated at every step.

A position is observed where everything before it was accepted and the plan allowed it. A position
that was not allowed is unobserved. Where a stop rule ended a draft, the next position was allowed
and not passed. So the survival at K is that of drafting under that rule, as a decision about K
under the same rule needs it; whether the draft would have been right there is not observed.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.theory.drift import DriftingRate, Memory

__all__ = ["Passing", "Prospects"]


class Passing:
    """Estimates P(position i passed given that i - 1 is passed and i allowed), for every i.

    Args:
        memory: of each position.
        strength: number of trials that the prior is worth.
    """

    __slots__ = ("_means", "memory", "rates", "strength")

    def __init__(self, memory: Memory, strength: float) -> None:
        self.memory = memory
        self.strength = strength
        self.rates: list[DriftingRate] = []
        self._means: dict[tuple[float, int], list[float]] = {}

    def observe(self, num_allowed: int, num_passed: int) -> None:
        """Count one step; a detected change at a position also shortens the memory of later ones.

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

    def means(self, prior: float, num_positions: int) -> list[float]:
        """Return posterior means; a position without trials has the mean of the one before it."""
        key = (prior, num_positions)
        if key in self._means:
            return self._means[key]
        found: list[float] = []
        mean, strength, rates = prior, self.strength, self.rates
        for index in range(num_positions):
            if index < len(rates):
                mean = rates[index].mean(mean, strength)
            found.append(mean)
        self._means[key] = found
        return found

    def means_given(self, priors: Sequence[float]) -> list[float]:
        """Return posterior means with a separate prior for every position."""
        strength = self.strength
        seen = zip(self.rates, priors, strict=False)
        found = [(rate.wins + prior * strength) / (rate.trials + strength) for rate, prior in seen]
        return [*found, *priors[len(found) :]]


class Prospects:
    """Estimates the drafted and the accepted depth of drafts under one drafter and stop rule.

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
