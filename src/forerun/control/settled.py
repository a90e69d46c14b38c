"""Decisions that hold for a while: beside a small model, deciding costs time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.control.base import Capacity, Plan, RequestState
from forerun.control.pricing import Allocation, Pricing, RequestCandidate
from forerun.control.punctuality import tpot_limit_s

__all__ = ["MOST_LONG", "MOST_PATIENCE", "NUM_COLD", "PLAIN_PATIENCE", "ActivePlan"]

MOST_PATIENCE = 8
"""Steps that plans are kept for, where they have turned out the same again and again."""
PLAIN_PATIENCE = 128
"""The same where nobody drafts: then nothing is learnt but how long plain steps take."""
MOST_LONG = 32
"""Plain steps that are settled together, at most: the first is asked about, the last told."""
NUM_COLD = 4
"""Plain steps after drafting that take longer than others, for it has left caches cold."""
TPOT_TOLERANCE = 0.98
"""Share of the seconds per token a request wished for, below which a new wish is another one."""


@dataclass(slots=True, kw_only=True, eq=False)
class ActivePlan:
    """What was decided, and from what. It holds for a few steps while the requests are the same.

    Attributes:
        names: of the requests.
        tpot_limits_s: seconds per token that each should stay below, None without a wish.
        plans: of all of them.
        followed: the same, as they are handed out, once that is known.
        max_rows: there was room for.
        patience: steps it holds for at most.
        candidates: what was chosen from.
        pricing: what steps take.
        allocation: what is expected of the step.
        num_steps: it was to hold for, once that is known.
        steps_left: of them.
    """

    names: list[str]
    tpot_limits_s: list[float | None]
    plans: list[Plan]
    followed: list[Plan] = field(init=False)
    max_rows: int
    patience: int
    candidates: list[RequestCandidate]
    pricing: Pricing
    allocation: Allocation
    num_steps: int = 0
    steps_left: int = 0

    def holds(self, states: Sequence[RequestState], capacity: Capacity) -> bool:
        """Whether it may be followed once more: by the same requests, in no greater hurry."""
        if self.max_rows != capacity.max_rows or len(states) != len(self.names):
            return False
        settled = zip(states, self.names, self.plans, self.tpot_limits_s, strict=True)
        for state, name, plan, limit_s in settled:
            if state.request_id != name or state.max_new <= plan.num_speculative_tokens:
                return False
            wish = tpot_limit_s(state)
            if wish != limit_s and (
                wish is None or limit_s is None or wish < TPOT_TOLERANCE * limit_s
            ):
                return False
        return True

    @property
    def is_cut_short(self) -> bool:
        """Whether plain steps that were to be many end early, to try something."""
        return self.patience == PLAIN_PATIENCE and self.num_steps + 1 < self.patience

    def hold(self, num_steps: int) -> None:
        """Say for how many steps more; where they are plain and many, not all are asked about."""
        self.num_steps = self.steps_left = num_steps
        self.followed = self.plans
        drafts = any([plan.num_speculative_tokens for plan in self.plans])
        if num_steps and not drafts and not any(self.tpot_limits_s):
            num_parts = -(-(num_steps + 1) // MOST_LONG)
            self.followed = [Plan(num_steps=-(-(num_steps + 1) // num_parts))] * len(self.plans)
