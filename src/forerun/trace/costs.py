"""Computes costs of steps from the durations in a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forerun.theory.record import Json, StepRecord

__all__ = ["MIN_PLAIN_STEPS", "MeasuredCycleCost", "StepCosts"]

MIN_PLAIN_STEPS = 8
"""Plain steps, counted per request, below which their mean time is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCycleCost:
    """kappa over the drafting steps for which plain steps at the same batch size exist.

    Attributes:
        estimate: seconds of drafting steps over those of as many plain steps.
        num_uncompared: drafting steps in cycles of a size no plain step had.
    """

    estimate: float
    num_steps: int
    num_uncompared: int

    def to_dict(self) -> dict[str, Json]:
        """Return JSON-ready values by name."""
        return {
            "estimate": self.estimate,
            "num_steps": self.num_steps,
            "num_uncompared": self.num_uncompared,
        }


@dataclass(slots=True, kw_only=True)
class Total:
    """Number of steps, and total seconds of their cycles."""

    num_steps: int = 0
    seconds: float = 0.0

    def add(self, num_steps: int, seconds: float) -> None:
        """Add steps and seconds to the totals."""
        self.num_steps += num_steps
        self.seconds += seconds


Totals = dict[int, Total]
"""By how many requests shared the cycle: a step costs more where there are more."""


@dataclass(slots=True, kw_only=True)
class StepCosts:
    """Number and seconds of decode steps, without cycles that include prefills.

    Attributes:
        drafting: steps that drafted.
        plain: steps of cycles without any draft.
    """

    drafting: Totals = field(default_factory=dict)
    plain: Totals = field(default_factory=dict)

    def add(self, record: StepRecord, cycle: Sequence[StepRecord]) -> None:
        """Count a decode step, except plain steps in a cycle with drafting steps."""
        if record.num_prefill_rows:
            return
        if record.num_drafted:
            totals = self.drafting
        elif any(other.num_drafted for other in cycle):
            return
        else:
            totals = self.plain
        seconds = record.draft_s + record.verify_s + record.other_s
        totals.setdefault(len(cycle), Total()).add(1, seconds)

    def include(self, other: StepCosts) -> None:
        """Add the totals of another group of steps."""
        for own, others in ((self.drafting, other.drafting), (self.plain, other.plain)):
            for size, total in others.items():
                own.setdefault(size, Total()).add(total.num_steps, total.seconds)

    @property
    def plain_step_s(self) -> Mapping[int, float]:
        """Return mean seconds of a plain step by batch size, where there are enough plain steps."""
        return {
            size: total.seconds / total.num_steps
            for size, total in self.plain.items()
            if total.num_steps >= MIN_PLAIN_STEPS and total.seconds > 0.0
        }

    def cycle_cost(self, plain_step_s: Mapping[int, float]) -> MeasuredCycleCost | None:
        """Return kappa of the drafting steps; None if no plain step has the same batch size."""
        compared = {size: t for size, t in self.drafting.items() if size in plain_step_s}
        num_steps = sum(total.num_steps for total in compared.values())
        if not num_steps:
            return None
        plain_s = sum(plain_step_s[size] * total.num_steps for size, total in compared.items())
        return MeasuredCycleCost(
            estimate=sum(total.seconds for total in compared.values()) / plain_s,
            num_steps=num_steps,
            num_uncompared=sum(t.num_steps for t in self.drafting.values()) - num_steps,
        )
