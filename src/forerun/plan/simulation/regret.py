"""Regret of a controller: its time over that of the best fixed K of every phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forerun.plan.simulation.result import Result

__all__ = ["Oracle", "oracle_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """The best fixed K of every phase.

    All requests of a phase meet the same texts under every controller, so request-seconds of their
    decode steps can be compared between runs.

    Attributes:
        ks: by phase.
        decode_s: request-seconds of decode steps at that K, by phase.
    """

    ks: tuple[int, ...]
    decode_s: tuple[float, ...]

    def regret(self, result: Result) -> float:
        """Return the request-seconds over the oracle's, less 1; negative if it was better."""
        return result.decode_s / sum(self.decode_s) - 1.0

    def phase_regrets(self, result: Result) -> tuple[float, ...]:
        """Return the same ratio less 1 by phase."""
        return tuple(
            phase.decode_s / best - 1.0 if best else 0.0
            for phase, best in zip(result.phases, self.decode_s, strict=True)
        )


def oracle_of(fixed: Mapping[int, Result]) -> Oracle:
    """Return the oracle over runs at fixed K.

    Args:
        fixed: by K, all of the same workload and seed.
    """
    num_phases = len(next(iter(fixed.values())).phases)
    best = [phase_best(fixed, phase) for phase in range(num_phases)]
    return Oracle(ks=tuple(k for k, _ in best), decode_s=tuple(seconds for _, seconds in best))


def phase_best(fixed: Mapping[int, Result], phase: int) -> tuple[int, float]:
    """Return the best K and its request-seconds, the smallest K among equals."""
    costs: Sequence[tuple[float, int]] = sorted(
        (result.phases[phase].decode_s, k) for k, result in fixed.items()
    )
    seconds, k = costs[0]
    return k, seconds
