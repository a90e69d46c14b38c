"""Plans that are made to learn something: what is never drafted would never be known."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from forerun.control.base import Chain, Plan
from forerun.control.beliefs import RequestClass, UnreadText
from forerun.control.config import GoodputConfig

__all__ = ["Exploration"]

LEAST_LOSS = 0.02
"""What trying another plan counts for at least, in steps: even what is free need not be all."""
SCOUTS = 4
"""One in so many of the requests that do not draft probes for all of them."""
LEAST_TEXT = 16
"""Tokens of output that a probe waits for, at most so many steps: it can look back at them."""
PROBE_DEPTH = 1
"""Tokens a probe drafts: the first one tells most of what a draft is worth."""
MOST_LOSS = 8.0
"""Largest loss that counts."""
NUM_LOSSES = 5
"""Probes whose median is charged, for any step may be held up by something else."""
MOST_CREDIT = 8
"""Steps by which a probe may come late, for nobody was asked, and the next still be in time."""
LEAST_NEED = 0.1
"""Least share of a probe's tokens that drafting is taken to need, and to do without."""
EAGER = 0.2
"""Largest share of the steps that pays for probes: where drafting has only just been given up."""
REVIVAL = 1.1
"""By which that share grows in a step in which nobody is idle."""


class Exploration:
    """Two kinds of curiosity, both by counting: no clock, no generator.

    Requests that do not draft probe now and then, a quarter of them in the same step: those first
    that have output to look back at, and of which the draft has least to catch up with. What such a
    probe costs, less what it brings, by the median of the last ones, is a debt that a share of the
    following steps pays off; only then comes the drafter's next one. So probes never cost more than
    that share, however dear they are. The share is large where drafting has only just been given
    up, on few observations, by requests of that kind. A probe that all came of doubles it; others
    shrink it so that it stays where as much comes of them as must, for drafting to pay but for what
    had to be caught up with, down to the share that is configured. One of which so much came is
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
        self._probing_method = ""
        self._num_explored = 0
        self._debts: defaultdict[str, float] = defaultdict(float)
        self._shares: dict[tuple[RequestClass | None, str], float] = {}
        self._kind: RequestClass | None = None
        self._owed = 0.0
        self._follows = False
        self._num_waited = 0
        self._losses: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=NUM_LOSSES))

    def rest(self, plans: Sequence[Plan], most: Sequence[int], patience: int) -> int:
        """Steps until something is due while these plans are followed, at least 1.

        Args:
            plans: what is believed best.
            most: largest K of every request.
            patience: steps after which it is asked again in any case.
        """
        steps, idle = float(patience), False
        for plan, limit in zip(plans, most, strict=True):
            if plan.num_speculative_tokens:
                steps = min(steps, steps_to_pay(self._owed, self.config.explore))
            elif limit:
                idle = True
        if idle:
            steps = min([steps, *map(self._wait, self._debts)])
        return max(1, math.ceil(steps))

    def varied(
        self,
        plans: list[Plan],
        most: Sequence[int],
        news: Callable[[int], UnreadText],
        methods: Sequence[str],
        max_nodes: int,
        num_steps: int = 1,
    ) -> list[Plan]:
        """The plans with some of them replaced, or the very list where none is.

        Args:
            plans: what is believed best.
            most: largest K of every request.
            news: what is new of a request, by its place.
            methods: drafters there are.
            max_nodes: that may be drafted in all.
            num_steps: since the last call, this one included.
        """
        self.probed, self.explored = [], None
        config = self.config
        spare = max_nodes - sum([plan.num_speculative_tokens for plan in plans])
        idle = [at for at, p in enumerate(plans) if not p.num_speculative_tokens and most[at]]
        self._kind = news(idle[0] if idle else 0).kind
        for method in methods:
            paid = self._share(method) / len(methods)
            self._debts[method] = max(-MOST_CREDIT * paid, self._debts[method] - num_steps * paid)
        self._owed = max(-config.explore, self._owed - num_steps * config.explore)
        if not idle:
            for method in {plan.method for plan in plans if plan.num_speculative_tokens}:
                share = min(EAGER, self._share(method) * REVIVAL**num_steps)
                self._shares[self._kind, method] = max(self._share(method), share)
        elif spare > 0 and (self._follows or min(self._debts.values()) <= 0.0):
            new = {at: news(at) for at in idle}
            if self._follows or self._is_ripe(max(each.tokens for each in new.values())):
                idle.sort(key=lambda at: (new[at].tokens < LEAST_TEXT, new[at].missed))
                self._kind = new[idle[0]].kind
                return self._probing(plans, idle, most, spare)
        if self._owed < 0.0:
            return self._exploring(plans, most, methods, spare)
        return plans

    def _share(self, method: str) -> float:
        """Of the steps, to pay for a drafter's probes of requests like the first that is idle."""
        return self._shares.get((self._kind, method), max(EAGER, self.config.probe_share))

    def _wait(self, method: str) -> float:
        """Steps until a drafter's next probe is paid for; below 0 where it has waited longer."""
        return steps_to_pay(self._debts[method], self._share(method) / len(self._debts))

    def _is_ripe(self, num_new: int) -> bool:
        """Whether a probe that is due has text to look back at, or has waited for it enough."""
        if num_new < LEAST_TEXT and self._num_waited < LEAST_TEXT:
            self._num_waited += 1
            return False
        self._num_waited = 0
        return True

    def _probing(
        self,
        plans: list[Plan],
        idle: Sequence[int],
        most: Sequence[int],
        spare: int,
    ) -> list[Plan]:
        """Let some idle requests draft a little, in the order given."""
        if not self._follows:
            self._probing_method = min(self._debts, key=self._wait)
        method = self._probing_method
        self._debts[method] = self._debts.pop(method)  # of equals the others come first next time
        varied = list(plans)
        for at in idle[: -(-len(idle) // SCOUTS)]:
            if spare > 0:
                k = min(PROBE_DEPTH, most[at], spare)
                varied[at] = Plan.chain(method, k, probe=True)
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
            other = Plan.chain(
                others[turn // 2 % len(others)],
                PROBE_DEPTH,
                probe=True,
            )
        elif k < most[at] and spare > 0:
            other = replace(plan, shape=Chain(num_tokens=k + 1), probe=True)
        else:
            self.pay(0.0)
            return plans
        self.explored = at
        return [*plans[:at], other, *plans[at + 1 :]]

    def pay(self, loss: float) -> None:
        """See what trying another plan is expected to lose.

        Args:
            loss: in steps without it.
        """
        self._owed += max(LEAST_LOSS, min(loss, MOST_LOSS))

    def observe(self, method: str, loss: float, *, came: float, needed: float) -> None:
        """See how a probe has fared.

        Args:
            method: of its drafter.
            loss: what it has cost less what it has brought, in steps without it; negative if it
                has paid.
            came: share of what was drafted, or would have been, that the target wrote.
            needed: the same where drafting pays, what had to be caught up with apart.
        """
        losses = self._losses[method]
        losses.append(min(loss, MOST_LOSS))
        self._debts[method] += max(LEAST_LOSS, median(losses))
        self._follows = came >= needed < 1.0
        if needed < 1.0:
            needed = max(LEAST_NEED, min(1.0 - LEAST_NEED, needed))
            factor = 2.0 ** ((came - needed) / (1.0 - needed))
        else:
            factor = 0.5  # whatever comes of it
        share = self._share(method) * factor
        share = max(self.config.probe_share, min(EAGER, share))
        self._shares[self._kind, method] = share


def steps_to_pay(debt: float, share: float) -> float:
    """Steps until a debt is paid off by a share of each."""
    return debt / share if share else math.inf
