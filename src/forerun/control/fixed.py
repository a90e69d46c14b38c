"""A controller that plans the same K for every request at every step."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.control.base import Capacity, Plan, RequestState
from forerun.theory.record import StepRecord

__all__ = ["FixedController"]


class FixedController:
    """Plans `method` with K tokens; fewer only where requests have to share the rows of a pass."""

    def __init__(self, num_speculative_tokens: int, method: str = "draft_model") -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.method = method

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> list[Plan]:
        """Return the plan of K tokens for every request; the engine applies request limits."""
        share = capacity.max_rows // max(1, len(states)) - 1
        k = max(0, min(self.num_speculative_tokens, share))
        plan = Plan.chain(self.method if k else "plain", k)
        return [plan] * len(states)

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Ignore the records: nothing is learnt."""
