"""Plans that are made to learn something: what is never drafted would never be known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from forerun.control.base import Plan
from forerun.control.config import GoodputConfig

__all__ = ["Exploration"]

LEAST_LOSS = 0.02
"""What trying another plan counts for at least, in steps: even what is free need not be all."""
SCOUTS = 4
"""One in so many of the requests that do not draft probes for all of them."""
PROBE_DEPTH = 1
"""Tokens a probe drafts: the first one tells most of what a draft is worth."""
MOST_LOSS = 8.0
"""Largest loss that counts: a step may be held up by anything."""
MOST_CREDIT = 8
"""Steps by which a probe may come late, for nobody was asked, and the next still be in time."""
EAGER = 0.2
"""Largest share of the steps that pays for probes: where drafting has only just been given up."""
REVIVAL = 1.1
"""By which that share grows in a step in which nobody is idle."""


class Exploration:
    """Two kinds of curiosity, both by counting: no clock, no generator.

    Requests that do not draft probe now and then, a quarter of them in the same step, those first
    of which the draft has least to catch up with. What such a probe costs, less what it brings, is
    a debt that a share of the following steps pays off; only then comes the next one. So probes
    never cost more than that share, however dear they are. The share is large where drafting has
    only just been given up, on few observations; a probe that pays doubles it, any other halves it,
    down to the one that is configured. One that pays but for what had to be caught up with is
    followed by the next at once.

    Requests that draft try a plan that is not believed best: one node more, or another drafter.
    What that is expected to lose is paid off by another small share of the steps before the next
    one. So what is believed to be nearly as good is tried often, and a belief that is wrong by
    little, which nothing else would ever contradict, does not last; what is believed to be bad is
    tried seldom.

    Args:
        config: how often.

    Attributes:
        probed: requests that probe in this step, by their place.
        explored: the request that tries another plan in this step, by its place.
    """

    def __init__(self, config: GoodputConfig) -> None:
        self.config = config
        self.probed: list[int] = []
        self.explored: int | None = None
        self._num_probes = 0
        self._num_explored = 0
        self._debt = 0.0
        self._share = max(EAGER, config.probe_share)
        self._owed = 0.0
        self._follows = False

    def rest(self, plans: Sequence[Plan], most: Sequence[int], patience: int) -> int:
        """Steps until something is due while these plans are followed, at least 1.

        Args:
            plans: what is believed best.
            most: largest K of every request.
            patience: steps after which it is asked again in any case.
        """
        config, steps = self.config, float(patience)
        for plan, limit in zip(plans, most, strict=True):
            if plan.num_speculative_tokens:
                steps = min(steps, steps_to_pay(self._owed, config.explore))
            elif limit:
                steps = min(steps, steps_to_pay(self._debt, self._share))
        return max(1, math.ceil(steps))

    def varied(
        self,
        plans: list[Plan],
        most: Sequence[int],
        missed: Callable[[int], int],
        methods: Sequence[str],
        max_nodes: int,
        num_steps: int = 1,
    ) -> list[Plan]:
        """The plans with some of them replaced, or the very list where none is.

        Args:
            plans: what is believed best.
            most: largest K of every request.
            missed: tokens that were decoded since a request drafted last, by its place.
            methods: drafters there are.
            max_nodes: that may be drafted in all.
            num_steps: since the last call, this one included.
        """
        self.probed, self.explored = [], None
        config = self.config
        self._debt = max(-MOST_CREDIT * self._share, self._debt - num_steps * self._share)
        self._owed = max(-config.explore, self._owed - num_steps * config.explore)
        spare = max_nodes - sum([plan.num_speculative_tokens for plan in plans])
        idle = [at for at, p in enumerate(plans) if not p.num_speculative_tokens and most[at]]
        if not idle:
            self._share = max(self._share, min(EAGER, self._share * REVIVAL**num_steps))
        elif spare > 0 and (self._debt <= 0.0 or self._follows):
            return self._probing(plans, sorted(idle, key=missed), most, methods, spare)
        if self._owed < 0.0:
            return self._exploring(plans, most, methods, spare)
        return plans

    def _probing(
        self,
        plans: list[Plan],
        idle: Sequence[int],
        most: Sequence[int],
        methods: Sequence[str],
        spare: int,
    ) -> list[Plan]:
        """Let some idle requests draft a little, in the order given."""
        method = methods[self._num_probes % len(methods)]
        varied = list(plans)
        for at in idle[: -(-len(idle) // SCOUTS)]:
            if spare > 0:
                k = min(PROBE_DEPTH, most[at], spare)
                varied[at] = Plan(method=method, num_speculative_tokens=k, probe=True)
                spare -= k
                self.probed.append(at)
        self._follows = False
        return varied

    def _exploring(
        self, plans: list[Plan], most: Sequence[int], methods: Sequence[str], spare: int
    ) -> list[Plan]:
        """Let one of the requests that draft do so otherwise, if it can."""
        drafting = [at for at, plan in enumerate(plans) if plan.num_speculative_tokens]
        if not drafting:
            return plans
        turn, place = divmod(self._num_explored, len(drafting))
        at = drafting[place]
        plan = plans[at]
        k = plan.num_speculative_tokens
        others = [method for method in methods if method != plan.method]
        self._num_explored += 1
        if others and turn % 2:
            other = replace(plan, method=others[turn // 2 % len(others)], probe=True)
        elif k < most[at] and spare > 0:
            other = replace(plan, num_speculative_tokens=k + 1, probe=True)
        else:
            self.pay(0.0)
            return plans
        self.explored = at
        return [*plans[:at], other, *plans[at + 1 :]]

    def pay(self, loss: float) -> None:
        """See what trying another plan is expected to lose.

        Args:
            loss: share of a step.
        """
        self._owed += max(LEAST_LOSS, loss)

    def observe(self, loss: float, *, pays: bool) -> None:
        """See how a probe has fared.

        Args:
            loss: what it has cost less what it has brought, in steps without it; negative if it
                has paid.
            pays: whether it would have, had there been nothing to catch up with.
        """
        self._debt += min(loss, MOST_LOSS)
        self._follows = pays
        self._num_probes += not pays
        share = self._share * (2.0 if pays else 0.5)
        self._share = max(self.config.probe_share, min(EAGER, share))


def steps_to_pay(debt: float, share: float) -> float:
    """Steps until a debt is paid off by a share of each."""
    return max(0.0, debt) / share if share else math.inf
