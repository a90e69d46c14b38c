"""Never slower than plain: a controller watched by what its steps took.

A cost table may be of another day and acceptance may be misjudged; tokens per second are what they
are. A small share of the steps is made plain whatever was planned, so that the time of a plain step
is known without a bias: at moments that depend on counting alone. Where the lower bound of the
speedup is below 1 for a batch and a context, speculation goes off there, and is tried again later.
Steps made to learn something are no part of that speedup; they are refused where they have cost too
much.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from forerun.control.base import Capacity, Controller, Plan, RequestState
from forerun.control.config import SafetyConfig
from forerun.control.settled import MOST_LONG, MOST_PATIENCE, NUM_COLD, PLAIN_PATIENCE
from forerun.theory.ratio import DiscountedRatio
from forerun.theory.record import StepRecord
from forerun.theory.splitmix import INCREMENT, finalise, share_of

__all__ = ["SafeController", "Switch"]

logger = logging.getLogger("forerun.control")

PLAIN = Plan()
FIRST_PLAIN = 4
"""Speculative steps until plain ones are made until enough of them are known."""
NUM_IN_A_ROW = NUM_COLD + 1
"""Steps made plain together, the last of which counts."""
MOST_SWITCHES = 1000
LOSS_MEMORY = 0.99
"""Weight that what probes have cost keeps after one more step."""

Kind = Literal["plain", "speculative", "probe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """Speculation went on or off.

    Attributes:
        step: of the controller.
        bucket: batch sizes and contexts it holds for, as exponents of 2.
        on: whether speculation is on from now on.
        reason: why.
    """

    step: int
    bucket: tuple[int, int]
    on: bool
    reason: str


class SpeedupBucket:
    """What is known of steps with about the same batch and context.

    Args:
        config: of the safety.
    """

    __slots__ = (
        "gap", "lost", "num_failures", "off_since", "on", "plain", "since_plain", "speculative",
    )  # fmt: skip

    def __init__(self, config: SafetyConfig) -> None:
        self.plain = DiscountedRatio(config.plain_memory)
        self.speculative = DiscountedRatio(config.memory)
        self.on = True
        self.off_since = 0
        self.since_plain = 0
        self.gap = FIRST_PLAIN
        """Speculative steps after which plain ones are made."""
        self.num_failures = 0
        self.lost = 0.0
        """By the inner controller's probes of late, in plain steps."""

    def charge(self, seconds: float, tokens: float, batch: int) -> None:
        """A probe of the inner controller, where it is known how fast plain decoding is."""
        if self.plain.num_pairs:
            self.lost = max(0.0, self.lost + (seconds * self.plain.ratio - tokens) / batch)

    def bounds(self, z: float) -> tuple[float, float]:
        """Of the speedup: tokens per second with and without speculation."""
        speedup = self.speculative.ratio / self.plain.ratio
        error = z * math.hypot(self.speculative.relative_error, self.plain.relative_error)
        return speedup * (1.0 - error), speedup * (1.0 + error)


class FollowedPlans(NamedTuple):
    """What becomes of the inner controller's plans, for as long as it repeats them.

    Attributes:
        inner: its plans, the very list.
        plans: what is followed.
        bucket: where it is.
        name: of that.
        kind: of step.
    """

    inner: list[Plan]
    plans: list[Plan]
    bucket: SpeedupBucket
    name: tuple[int, int]
    kind: Kind


class SafeController:
    """Another controller's plans, made plain where they do not pay.

    Args:
        inner: whose plans.
        config: when they are not followed.

    Attributes:
        switches: the last times speculation went on or off.
        num_switches: all of them, "on" and "off".
        num_probes: steps made plain to measure them.
        num_refused: steps in which probes of the inner controller were, having cost too much.
    """

    def __init__(self, inner: Controller, config: SafetyConfig | None = None) -> None:
        self.inner = inner
        self.config = config or SafetyConfig()
        self.switches: list[Switch] = []
        self.num_switches: Counter[str] = Counter()
        self.num_probes = 0
        self.num_refused = 0
        self.num_steps = 0
        self._buckets: dict[tuple[int, int], SpeedupBucket] = {}
        self._held: FollowedPlans | None = None
        self._steps_held = 0
        self._steps_left = 0
        self._asked: FollowedPlans | None = None
        self._wants_drafts = False
        self._num_plain = 0

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> list[Plan]:
        """The inner controller's plans, or plain ones; its probes pass while they cost little."""
        plans = self.inner.decide(states, capacity)
        if not states:
            return plans
        self.num_steps += capacity.num_steps
        held = self._held
        was_plain = held is not None and held.kind == "plain"
        self._num_plain = self._num_plain + capacity.num_steps if was_plain else 0
        is_same = held is not None and plans is held.inner and len(plans) == len(held.plans)
        if is_same and self._steps_left >= capacity.num_steps:
            self._steps_left -= capacity.num_steps
        else:
            self._held = held = self._decide_anew(bucket_of(states), plans, capacity.num_steps)
        assert held is not None
        self._asked = held
        return held.plans

    def _decide_anew(
        self, name: tuple[int, int], inner: list[Plan], num_steps: int
    ) -> FollowedPlans:
        num_steps += self._steps_held - self._steps_left
        self._steps_held = self._steps_left = 0
        is_repeated = self._held is not None and self._held.inner is inner
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = SpeedupBucket(self.config)
        bucket.lost *= LOSS_MEMORY**num_steps
        plans, kind = inner, kind_of(inner)
        if kind != "probe":
            self._wants_drafts = kind == "speculative"
        elif self._probes_too_much(bucket):
            self.num_refused += 1
            plans = [PLAIN if plan.probe else plan for plan in inner]
        if kind_of(plans) == "speculative" and not bucket.on and self._steps_off(bucket) <= 0:
            self._switch(name, bucket, on=True, reason="tried again")
        if bucket.on and self._wants_drafts and bucket.since_plain >= bucket.gap:
            plans = all_plain(plans, NUM_IN_A_ROW - self._num_plain)  # probes would end the run
            self.num_probes += plans[0].num_steps
        if not bucket.on and (self._wants_drafts or kind_of(plans) == "speculative"):
            plans = all_plain(plans, min(MOST_LONG, self._steps_off(bucket)))
        kind = kind_of(plans)
        if is_repeated and kind == kind_of(inner) != "probe":
            most = PLAIN_PATIENCE
            if kind == "speculative":
                most = min(MOST_PATIENCE, bucket.gap - bucket.since_plain)
            self._steps_held = self._steps_left = max(0, most - 1)
        return FollowedPlans(inner, plans, bucket, name, kind)

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Learn how fast the step was, and judge."""
        self.inner.observe(records)
        held, self._asked = self._asked, None
        if held is None or len(records) != len(held.plans):
            return
        bucket, first = held.bucket, records[0]
        bucket.since_plain += held.kind == "speculative"
        if first.num_prefill_rows:
            return
        seconds = first.draft_s + first.verify_s + first.other_s
        tokens = float(sum([record.num_accepted + 1 for record in records]))
        if held.kind == "probe":  # made to learn something, and known to be slower
            bucket.charge(seconds, tokens, len(records))
        elif held.kind == "speculative":
            bucket.speculative.observe(seconds, tokens)
            if not self._steps_left:
                self._judge(held.name, bucket)
        elif not bucket.plain.num_pairs or self._in_a_row(held) >= NUM_IN_A_ROW:
            bucket.plain.observe(seconds, tokens)
            if bucket.plain.num_pairs >= self.config.num_plain:
                bucket.since_plain, bucket.gap = 0, self._gap()

    def _in_a_row(self, held: FollowedPlans) -> int:
        """Plain steps so far; the first ones take longer than plain decoding alone."""
        return self._num_plain + held.plans[0].num_steps

    def _judge(self, name: tuple[int, int], bucket: SpeedupBucket) -> None:
        config, num_steps = self.config, bucket.speculative.num_pairs
        if not bucket.on or bucket.plain.num_pairs < config.num_plain:
            return
        if num_steps < config.num_clear:
            return
        low, high = bucket.bounds(config.z)
        if high < 1.0:
            self._turn_off(name, bucket, f"speedup at most {high:.3f}, slower than plain")
        elif num_steps >= config.num_speculative:
            if low < 1.0:
                self._turn_off(name, bucket, f"speedup at least {low:.3f}, maybe slower than plain")
            else:
                bucket.num_failures = 0

    def _turn_off(self, name: tuple[int, int], bucket: SpeedupBucket, reason: str) -> None:
        bucket.off_since = self.num_steps
        bucket.num_failures += 1
        bucket.speculative = DiscountedRatio(self.config.memory)
        self._switch(name, bucket, on=False, reason=reason)

    def _probes_too_much(self, bucket: SpeedupBucket) -> bool:
        config = self.config
        return bucket.lost * (1.0 - LOSS_MEMORY) > config.probe_loss

    def _steps_off(self, bucket: SpeedupBucket) -> int:
        """How long speculation stays off; 0 or less where it may be tried again."""
        config = self.config
        patience: int = config.retry_after << min(16, max(0, bucket.num_failures - 1))
        return bucket.off_since + min(patience, config.longest_retry) - self.num_steps

    def _gap(self) -> int:
        """Until about `probe_share` of the steps are plain, at moments nobody else decides."""
        share = share_of(finalise(~self.num_probes * INCREMENT))
        return 1 + int(2.0 * NUM_IN_A_ROW * share / self.config.probe_share)

    def _switch(
        self, name: tuple[int, int], bucket: SpeedupBucket, *, on: bool, reason: str
    ) -> None:
        bucket.on = on
        self.num_switches["on" if on else "off"] += 1
        self.switches.append(Switch(step=self.num_steps, bucket=name, on=on, reason=reason))
        del self.switches[:-MOST_SWITCHES]
        logger.info(
            "speculation %s at batch %d to %d, context %d to %d: %s",
            "on" if on else "off",
            *(size for exponent in name for size in (2**exponent, 2 ** (exponent + 1) - 1)),
            reason,
        )


def kind_of(plans: Sequence[Plan]) -> Kind:
    """A probe is one where anybody probes, a step is plain where nobody drafts."""
    kind: Kind = "plain"
    for plan in plans:
        if plan.probe:
            return "probe"
        if plan.num_speculative_tokens:
            kind = "speculative"
    return kind


def all_plain(plans: Sequence[Plan], num_steps: int) -> list[Plan]:
    """Plain plans for all of them, to be followed for so many steps."""
    return [Plan(num_steps=max(1, num_steps))] * len(plans)


def bucket_of(states: Sequence[RequestState]) -> tuple[int, int]:
    """Batch and mean context, to powers of two."""
    context = sum([state.num_committed for state in states]) // len(states)
    return len(states).bit_length() - 1, max(1, context).bit_length() - 1
