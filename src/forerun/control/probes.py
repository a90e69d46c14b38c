"""Schedule of probes, short drafts that update an acceptance estimate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forerun.control.allocation import Allocation, Allocator
from forerun.control.base import Plan, RequestState
from forerun.control.config import (
    FIRST_PROBE_LOSS,
    FIRST_PROBES,
    FOLLOWING,
    FOLLOWING_LOSS,
    LARGEST_PROBE_GAP,
    LARGEST_PROBE_LOSS,
    LEAST_PROBE_LOSS,
    PLAIN_REUSE,
    GoodputConfig,
)
from forerun.theory.record import StepRecord

__all__ = ["Probes"]


class Probes:
    """Schedules probes so that they cost at most a given share of the time.

    While no request drafts, one of them drafts one token at intervals, because acceptance cannot be
    estimated without drafts. While requests draft, one of them tries one token more or less, or
    another drafter. The next probe waits until the loss of this one, in steps, is a given share of
    the steps since, so the share bounds the loss of all probes. The share is larger where drafting
    was stopped a short time ago, on few observations. After an accepted probe others follow at once
    as long as they lose little, because the drafter has no tokens left to process first.

    Args:
        config: the shares.
        methods: names of the drafters.
        max_k: largest K.

    Attributes:
        idle_loss: loss of probes beside plain decoding that later steps have not made up for yet.
        explore_loss: the same of probes beside drafting; both in steps.
    """

    def __init__(self, config: GoodputConfig, methods: Sequence[str], max_k: int) -> None:
        self.config = config
        self.max_k = max_k
        self.methods = methods
        self.idle_loss = self.explore_loss = FIRST_PROBE_LOSS
        self._share = config.probe_share
        self._num_idle_probes = self._num_explored = 0
        self._num_following = 0
        self._expected_loss: float | None = None

    def pass_step(self, num_plain: int, *, has_drafted: bool) -> None:
        """Reduce the accumulated cost of probes by the share of time that one step grants them."""
        share = self.config.probe_share
        if has_drafted:
            share = max(share, FIRST_PROBES / (8.0 + num_plain))
        self._share = share
        if num_plain:
            self.idle_loss = max(0.0, self.idle_loss - share)
        else:
            self.explore_loss = max(0.0, self.explore_loss - self.config.explore)

    def steps_left(self, drafts: bool) -> int:
        """Return the number of steps until a probe can be due, at least 1."""
        if drafts:
            share, loss = self.config.explore, self.explore_loss
        else:
            share = self._share
            loss = 0.0 if self._is_idle_probe_due else self.idle_loss
        return PLAIN_REUSE if share <= 0.0 else max(1, int(loss / share))

    @property
    def _is_idle_probe_due(self) -> bool:
        """Whether a probe is due without drafting; an accepted probe may be followed at once."""
        most = FOLLOWING_LOSS if self._num_following else 0.0
        return self.idle_loss <= most

    def plans(
        self,
        plans: list[Plan],
        states: Sequence[RequestState],
        room: int,
        num_unread: Callable[[RequestState], int],
    ) -> list[Plan] | None:
        """Return the plans with one probe, or None if no probe is due or the pass lacks rows.

        Args:
            plans: the best ones.
            states: of the requests.
            room: nodes that may be drafted besides.
            num_unread: tokens that a drafter has to read first; the request with fewest probes.
        """
        drafting = [at for at, plan in enumerate(plans) if plan.num_speculative_tokens]
        if room < 1:
            return None
        if drafting:
            if self.explore_loss > 0.0 or self.config.explore <= 0.0:
                return None
            return self._explore(plans, states, drafting)
        if not self._is_idle_probe_due or self.config.probe_share <= 0.0:
            return None
        able = [at for at, state in enumerate(states) if state.max_new > 1]
        if not able:
            return None
        method = self.methods[self._num_idle_probes % len(self.methods)]
        self._num_idle_probes += 1
        at = min(able, key=lambda at: num_unread(states[at]))
        return [*plans[:at], Plan.chain(method, 1, probe=True), *plans[at + 1 :]]

    def _explore(
        self, plans: list[Plan], states: Sequence[RequestState], drafting: Sequence[int]
    ) -> list[Plan] | None:
        """Make one request a probe: alternately one token more, or one token of another drafter."""
        turn, place = divmod(self._num_explored, len(drafting))
        at = drafting[place]
        self._num_explored += 1
        plan = plans[at]
        others = [method for method in self.methods if method != plan.method]
        k = plan.shape.depth + (-1 if turn % 3 == 2 else 1)
        if others and turn % 2:
            other = Plan.chain(others[turn // 2 % len(others)], 1, probe=True)
        elif 0 < k < states[at].max_new and k <= self.max_k:
            other = Plan.chain(plan.method, k, stop=plan.stop, probe=True)
        else:
            return None
        return [*plans[:at], other, *plans[at + 1 :]]

    def expect(
        self,
        probed: Sequence[Plan],
        plans: Sequence[Plan],
        without: Allocation,
        room: Allocator,
    ) -> None:
        """Record the expected cost of a probe that differs from the best plans only in depth.

        Its measured loss depends far more on chance than on the depth.
        """
        self._expected_loss = None
        same = all(a.method == b.method for a, b in zip(probed, plans, strict=True))
        if any(without.depths) and without.tree is None and same:
            tried = room.at([plan.num_speculative_tokens for plan in probed])
            self._expected_loss = tried.step_s / without.step_s - tried.tokens / without.tokens

    def charge(
        self, probed: Sequence[Plan], records: Sequence[StepRecord], without: Allocation
    ) -> None:
        """Add the measured cost of a probe, in steps without probes."""
        if not any(record.num_drafted for record in records):
            return  # the drafter paused, or a guard of the speed made the step plain
        first = records[0]
        took = (first.draft_s + first.verify_s + first.other_s) / without.step_s
        emitted = sum(1 + record.num_accepted for record in records) / without.tokens
        drafts = any(without.depths)
        most = LARGEST_PROBE_LOSS if drafts else LARGEST_PROBE_GAP * self.config.probe_share
        loss = took - emitted if self._expected_loss is None else self._expected_loss
        loss = max(LEAST_PROBE_LOSS, min(loss, most))
        if drafts:
            self.explore_loss += loss
        else:
            self.idle_loss += loss
            accepted = any(record.num_accepted for record in records)
            self._num_following = FOLLOWING if accepted else max(0, self._num_following - 1)
