"""Plans that are made to learn something: what is never drafted would never be known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from forerun.control.base import Plan
from forerun.control.config import GoodputConfig
from forerun.theory.splitmix import INCREMENT, finalise

__all__ = ["Exploration", "share_of"]

DEEPER = 2
"""Nodes beyond the best K in a step that explores."""
SCOUTS = 4
"""One in so many of the requests that do not draft probes for all of them."""
MOST_LOSS = 8.0
"""Largest loss that counts: a step may be held up by anything."""
MOST_CREDIT = 2.0
"""Steps that probes may lose before they have to be paid for."""


class Exploration:
    """Two kinds of curiosity, both by counting: no clock, no generator.

    Requests that do not draft draft one token now and then, a quarter of them in the same step,
    those first of which the draft has least to catch up with. What such a probe costs, less what it
    brings, is a debt that a small share of the following steps pays off; only then comes the next
    one. So probes never cost more than that share, however dear they are, and where they pay they
    follow upon each other until that is believed. While all draft, credit builds up: when drafting
    is given up, a few probes look whether that was right.

    Besides, in a small share of the steps one request drafts deeper than is believed best, or with
    another drafter.

    Args:
        config: how often.

    Attributes:
        num_steps: of the batch.
        probed: requests that probe in this step, by their place.
    """

    def __init__(self, config: GoodputConfig) -> None:
        self.config = config
        self.num_steps = 0
        self.probed: list[int] = []
        self._debt = 0.0

    def varied(
        self,
        plans: list[Plan],
        most: Sequence[int],
        missed: Callable[[int], int],
        methods: Sequence[str],
        max_nodes: int,
    ) -> list[Plan]:
        """The plans with some of them replaced, or the very list where none is.

        Args:
            plans: what is believed best.
            most: largest K of every request.
            missed: tokens that were decoded since a request drafted last, by its place.
            methods: drafters there are.
            max_nodes: that may be drafted in all.
        """
        self.num_steps += 1
        num_planned = sum([plan.num_speculative_tokens for plan in plans])
        varied = self._probing(plans, most, missed, methods, max_nodes - num_planned)
        spare = max_nodes - num_planned - len(self.probed)
        chance = finalise(self.num_steps * INCREMENT)
        if share_of(chance) < self.config.explore:
            at = chance % len(plans)
            varied = list(varied)
            varied[at] = self._other(varied[at], most[at], methods, spare)
        return varied

    def _probing(
        self,
        plans: list[Plan],
        most: Sequence[int],
        missed: Callable[[int], int],
        methods: Sequence[str],
        spare: int,
    ) -> list[Plan]:
        """Let some idle requests draft a token each where it can be afforded."""
        idle = [at for at, plan in enumerate(plans) if not plan.num_speculative_tokens and most[at]]
        self.probed = []
        if self._debt > 0.0 or not idle:
            self._debt = max(-MOST_CREDIT, self._debt - self.config.probe_share)
            return plans
        if spare < 1:
            return plans
        idle.sort(key=missed)
        self.probed = idle[: min(spare, -(-len(idle) // SCOUTS))]
        probe = Plan(
            method=methods[self.num_steps % len(methods)], num_speculative_tokens=1, probe=True
        )
        return [probe if at in self.probed else plan for at, plan in enumerate(plans)]

    def _other(self, plan: Plan, most: int, methods: Sequence[str], spare: int) -> Plan:
        """A plan that is not believed best."""
        k = plan.num_speculative_tokens
        if k == 0 or plan.probe:
            return plan
        if len(methods) > 1 and self.num_steps % 2:
            others = [method for method in methods if method != plan.method]
            return replace(plan, method=others[self.num_steps // 2 % len(others)], probe=True)
        deeper = min(most, k + min(DEEPER, spare))
        return replace(plan, num_speculative_tokens=deeper, probe=True) if deeper > k else plan

    def observe(self, loss: float) -> None:
        """See how a probe has fared.

        Args:
            loss: what it has cost less what it has brought, in steps without it; negative if it
                has paid.
        """
        self._debt = max(-MOST_CREDIT, self._debt + min(loss, MOST_LOSS))


def share_of(bits: int) -> float:
    """A number in [0, 1) out of 64 bits."""
    return bits / 2.0**64
