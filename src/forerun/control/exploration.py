"""Plans that are made to learn something: what is never drafted would never be known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from forerun.control.base import Plan
from forerun.control.config import GoodputConfig

__all__ = ["Exploration"]

LEAST_LOSS = 0.02
"""What trying another plan counts for at least, in steps: even what is free need not be all."""
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

    Requests that draft try a plan that is not believed best: one node more, or another drafter.
    What that is expected to lose is paid off by another small share of the steps before the next
    one. So what is believed to be nearly as good is tried often, and a belief that is wrong by
    little, which nothing else would ever contradict, does not last; what is believed to be bad is
    tried seldom.

    Args:
        config: how often.

    Attributes:
        num_steps: of the batch.
        probed: requests that probe in this step, by their place.
        explored: the request that tries another plan in this step, by its place.
    """

    def __init__(self, config: GoodputConfig) -> None:
        self.config = config
        self.num_steps = 0
        self.probed: list[int] = []
        self.explored: int | None = None
        self._debt = 0.0
        self._owed = 0.0

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
        self.explored = None
        share = self.config.explore
        self._owed = max(-share, self._owed - share)
        if self._owed < 0.0 and num_planned and not self.probed:
            return self._exploring(plans, most, methods, max_nodes - num_planned)
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

    def _exploring(
        self, plans: list[Plan], most: Sequence[int], methods: Sequence[str], spare: int
    ) -> list[Plan]:
        """Let one of the requests that draft do so otherwise, if it can."""
        drafting = [at for at, plan in enumerate(plans) if plan.num_speculative_tokens]
        at = drafting[self.num_steps % len(drafting)]
        plan = plans[at]
        k = plan.num_speculative_tokens
        others = [method for method in methods if method != plan.method]
        if others and self.num_steps // len(drafting) % 2:
            other = replace(plan, method=others[self.num_steps // 2 % len(others)], probe=True)
        elif k < most[at] and spare > 0:
            other = replace(plan, num_speculative_tokens=k + 1, probe=True)
        else:
            return plans
        self.explored = at
        return [*plans[:at], other, *plans[at + 1 :]]

    def pay(self, loss: float) -> None:
        """See what trying another plan is expected to lose.

        Args:
            loss: share of a step.
        """
        self._owed += max(LEAST_LOSS, loss)

    def observe(self, loss: float) -> None:
        """See how a probe has fared.

        Args:
            loss: what it has cost less what it has brought, in steps without it; negative if it
                has paid.
        """
        self._debt = max(-MOST_CREDIT, self._debt + min(loss, MOST_LOSS))
