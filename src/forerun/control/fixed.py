"""The same K for every request at every step."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.control.base import Capacity, Plan, RequestState
from forerun.theory.record import StepRecord

__all__ = ["FixedController"]


class FixedController:
    """Always `method` with K tokens; fewer only where the rows of a pass have to be shared."""

    def __init__(self, num_speculative_tokens: int, method: str = "draft_model") -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.method = method

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> list[Plan]:
        """K for everyone (the engine drafts no further than a request may go)."""
        share = capacity.max_rows // max(1, len(states)) - 1
        k = max(0, min(self.num_speculative_tokens, share))
        plan = Plan.chain(self.method if k else "plain", k)
        return [plan] * len(states)

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Nothing to learn."""
