"""The same K for every request at every step."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.control.base import Capacity, Plan, RequestState
from forerun.theory.record import StepRecord

__all__ = ["FixedController"]


class FixedController:
    """Always `method` with K tokens; fewer only where the request is about to end."""

    def __init__(self, num_speculative_tokens: int, method: str = "draft_model") -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.method = method

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> list[Plan]:
        """K, cut to one below what may still be emitted (the pass always yields one more token)."""
        share = capacity.max_rows // max(1, len(states)) - 1
        plans = []
        for state in states:
            k = max(0, min(self.num_speculative_tokens, state.max_new - 1, share))
            plans.append(Plan(method=self.method if k else "plain", num_speculative_tokens=k))
        return plans

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Nothing to learn."""
