"""Experiments that an operator can run next, with their minutes and the facts they yield.

The tests themselves are in `tables/experiments.toml`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import sqrt

import msgspec

from forerun.diagnose.causes import Cause
from forerun.diagnose.evidence import Evidence
from forerun.diagnose.tables import load_table

__all__ = ["EXPERIMENTS", "Experiment", "best_experiment", "experiment_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A test that an operator can run.

    Attributes:
        name: short.
        how: what to do, in one sentence.
        minutes: what it takes a person who has the machine; an order of magnitude.
        yields: facts that are known afterwards.
    """

    name: str
    how: str
    minutes: float
    yields: tuple[str, ...]


EXPERIMENTS = msgspec.convert(load_table("experiments")["experiment"], tuple[Experiment, ...])
"""Every experiment, in the order of the documentation."""


def experiment_for(cause: Cause, evidence: Evidence) -> Experiment | None:
    """Return the test that tells most about a cause for its time; None where all is known."""
    spreads = {sign.fact: sign.spread for sign in cause.signs if sign.fact not in evidence}
    return best_of(lambda item: sum(spreads.get(fact, 0.0) for fact in item.yields))


def best_experiment(
    weights: Mapping[str, float], causes: Iterable[Cause], evidence: Evidence
) -> Experiment | None:
    """Return the test that separates the causes best for the time it takes.

    A fact is worth the spread between causes of what it would say of them, weighted by how likely
    they are.

    Args:
        weights: how likely each cause is, by label; they add up to 1.
        causes: all of them.
        evidence: what is known already.
    """
    if not weights:
        return None
    signs = {
        cause.label: {sign.fact: sign.yes - sign.no for sign in cause.signs} for cause in causes
    }

    def worth(item: Experiment) -> float:
        total = 0.0
        for fact in item.yields:
            if fact not in evidence:
                moves = [(share, signs[label].get(fact, 0.0)) for label, share in weights.items()]
                mean = sum(share * move for share, move in moves)
                total += sqrt(sum(share * (move - mean) ** 2 for share, move in moves))
        return total

    return best_of(worth)


def best_of(worth: Callable[[Experiment], float]) -> Experiment | None:
    """Return the test of most information for its time; information counts more than time."""
    ranked = [(worth(item) / sqrt(item.minutes), item) for item in EXPERIMENTS]
    value, item = max(ranked, key=lambda pair: pair[0])
    return item if value > 0.0 else None
