"""A controller whose plans carry a stop rule."""

from __future__ import annotations

from forerun.control.base import Plan
from forerun.theory.stop_rule import StopRule


class StopBelow:
    """Plans K tokens of a draft model that end where its top probability is below a threshold."""

    def __init__(self, max_k: int, threshold: float = 0.4) -> None:
        rule = StopRule(measure="top_probability", threshold=threshold)
        self.plan = Plan.chain("draft_model", max_k, stop=rule)

    def decide(self, states, capacity):
        return [self.plan] * len(states)

    def observe(self, records):
        """Learns nothing."""
