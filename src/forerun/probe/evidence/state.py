"""Facts about whether drafts are made from the right state, from accepted positions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from forerun.diagnose.evidence import Evidence
from forerun.probe.evidence.tape import TapedRequest, TapedStep

__all__ = ["AcceptedShare", "StateTally", "before_step"]

MIN_POSITIONS = 100
"""Least number of positions; neighbouring ones are alike."""
MIN_DROP = 0.15
"""A smaller difference explains no complaint."""
MIN_Z = 5.0
"""Positions of one text depend on each other, so this is higher than for independent ones."""


@dataclass(slots=True, kw_only=True)
class AcceptedShare:
    """Drafted positions that were tested and accepted.

    Attributes:
        num_reached: drafted positions whose predecessors were accepted.
        num_accepted: accepted ones among them.
    """

    num_reached: int = 0
    num_accepted: int = 0

    def add(self, num_reached: int, num_accepted: int) -> None:
        """Add to the counts."""
        self.num_reached += num_reached
        self.num_accepted += num_accepted

    @property
    def words(self) -> str:
        """Return the counts as text."""
        return f"{self.num_accepted} of {self.num_reached}"

    def is_below(self, other: AcceptedShare) -> bool | None:
        """Whether acceptance is clearly lower here; None where that is open."""
        if min(self.num_reached, other.num_reached) < MIN_POSITIONS:
            return None
        difference = other.num_accepted / other.num_reached - self.num_accepted / self.num_reached
        num_both = self.num_reached + other.num_reached
        both = (self.num_accepted + other.num_accepted) / num_both
        error = math.sqrt(both * (1 - both) * (1 / self.num_reached + 1 / other.num_reached))
        if difference >= MIN_DROP and difference >= MIN_Z * error:
            return True
        return False if difference + 2 * error < MIN_DROP else None


MIN_STEPS = 30
"""Least number of steps from which their being right is a fact."""
MIN_WRONG = 3
"""Fewer may be ties that rounding decided."""
CLEAN = 0.005
"""Share of steps at which a fault may seem to begin where there is none."""
WRONG = 0.02
AFTER_STEP = ("none", "partial", "full")
HAND_OVER = ("start", "pause")


@dataclass(slots=True)
class Onsets:
    """Steps whose predecessor drafted correctly, and those of them that did not."""

    num_steps: int = 0
    num_wrong: int = 0


@dataclass(slots=True)
class StateTally:
    """Counts of first wrong drafts, by the outcome of the previous step.

    Attributes:
        onsets: by "start" of a request, "pause" (a step without a draft), and what became of the
            draft before: "none" of it was accepted, a "partial" one, or the "full" one.
    """

    onsets: dict[str, Onsets] = field(default_factory=dict)

    def add(self, request: TapedRequest, wrong: dict[int, bool]) -> None:
        """Add one request.

        Args:
            request: taped.
            wrong: by committed tokens at the start of a step, whether its first draft is wrong;
                steps about which nothing is known are left out.
        """
        was_right = True
        for before, step in before_step(request):
            kind = wrong.get(step.record.context_tokens)
            if kind is None:
                continue
            if was_right or before in HAND_OVER:
                onsets = self.onsets.setdefault(before, Onsets())
                onsets.num_steps += 1
                onsets.num_wrong += kind
            was_right = not kind

    def add_facts(self, evidence: Evidence) -> None:
        """Add whether drafts become wrong after a step (rollback), or at a start or a pause."""
        self._add(evidence, "rollback_wrong", AFTER_STEP)
        self._add(evidence, "acceptance_falls_after_handoff", HAND_OVER)

    def _add(self, evidence: Evidence, name: str, kinds: tuple[str, ...]) -> None:
        seen = {kind: self.onsets[kind] for kind in kinds if kind in self.onsets}
        num = sum(onsets.num_steps for onsets in seen.values())
        wrong = sum(onsets.num_wrong for onsets in seen.values())
        listed = ", ".join(f"{o.num_wrong} of {o.num_steps} after {k}" for k, o in seen.items())
        answer: bool | None = None
        if wrong >= MIN_WRONG and wrong > WRONG * num:
            answer = True
        elif num >= MIN_STEPS and wrong <= CLEAN * num:
            answer = False
        evidence.add(name, answer, f"first drafts go wrong: {listed}")


def before_step(request: TapedRequest) -> list[tuple[str, TapedStep]]:
    """Yield every drafting step with the outcome of the step before it."""
    found: list[tuple[str, TapedStep]] = []
    before = "start"
    for step in request.steps:
        if step.num_drafted:
            found.append((before, step))
            before = kind_of(step)
        elif before != "start":
            before = "pause"
    return found


def kind_of(step: TapedStep) -> str:
    """Return the kind of a step by the outcome of its draft."""
    accepted = step.record.num_accepted
    return "none" if not accepted else "full" if accepted == step.num_drafted else "partial"
