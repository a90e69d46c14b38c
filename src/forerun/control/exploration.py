"""Plans that are made to learn something: what is never drafted would never be known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forerun.control.base import Plan
from forerun.control.config import GoodputConfig
from forerun.theory.record import StepRecord
from forerun.theory.splitmix import INCREMENT, finalise

__all__ = ["Exploration", "share_of"]

DEEPER = 2
"""Nodes beyond the best K in a step that explores."""


class Exploration:
    """Two kinds of curiosity, both by counting steps: no clock, no generator.

    Requests that do not draft draft one token now and then, all in the same step. That also feeds
    the draft what it has missed, so that it is not far behind when it is wanted again. The longer
    nothing is accepted, the rarer it gets; once something is, the next step looks again.

    Besides, in a small share of the steps one request drafts deeper than is believed best, or with
    another drafter.

    Args:
        config: how often.
    """

    def __init__(self, config: GoodputConfig) -> None:
        self.config = config
        self.num_steps = 0
        self._interval = config.first_probe
        self._since = 0
        self._probing = False

    def varied(
        self, plans: Sequence[Plan], most: Sequence[int], methods: Sequence[str], max_nodes: int
    ) -> list[Plan]:
        """The plans with some of them replaced.

        Args:
            plans: what is believed best.
            most: largest K of every request.
            methods: drafters there are.
            max_nodes: that may be drafted in all.
        """
        self.num_steps += 1
        varied = list(plans)
        spare = max_nodes - sum(plan.num_speculative_tokens for plan in plans)
        spare -= self._probe(varied, most, methods, spare)
        chance = finalise(self.num_steps * INCREMENT)
        if share_of(chance) < self.config.explore:
            at = chance % len(plans)
            varied[at] = self._other(varied[at], most[at], methods, spare)
        return varied

    def _probe(
        self, plans: list[Plan], most: Sequence[int], methods: Sequence[str], spare: int
    ) -> int:
        """Let idle requests draft a token each where it is time; how many do."""
        idle = [at for at, plan in enumerate(plans) if not plan.num_speculative_tokens and most[at]]
        self._probing = False
        if not idle:
            self._since, self._interval = 0, self.config.first_probe
            return 0
        self._since += 1
        if self._since < self._interval or spare < 1:
            return 0
        self._since, self._probing = 0, True
        method = methods[self.num_steps % len(methods)]
        probed = idle[:spare]
        for at in probed:
            plans[at] = Plan(method=method, num_speculative_tokens=1, probe=True)
        return len(probed)

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

    def observe(self, records: Sequence[StepRecord]) -> None:
        """See how a probe has fared."""
        if not self._probing:
            return
        self._probing = False
        if any(record.k_budget == 1 and record.num_accepted for record in records):
            self._interval = 1
        else:
            self._interval = min(self.config.probe_every, 2 * max(1, self._interval))


def share_of(bits: int) -> float:
    """A number in [0, 1) out of 64 bits."""
    return bits / 2.0**64
