"""Controller that measures speculation against plain decoding and switches to the faster one.

Cost tables may be out of date and acceptance may be misjudged, so tokens per second are measured. A
small share of the steps is made plain whatever was planned, at moments that depend on counts alone,
so that the time of a plain step is known without bias. Where the upper bound of the measured
speedup is below 1 for a batch size, decoding is plain there for a while, and speculation is then
tried again.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from forerun.control.base import Capacity, Controller, Plan, RequestState
from forerun.control.config import FIRST_PLAIN_GAP, MAX_SWITCHES, NUM_COLD, SafetyConfig
from forerun.theory.ratio import DiscountedRatio
from forerun.theory.record import StepRecord
from forerun.theory.splitmix import INCREMENT, finalise, share_of

__all__ = ["SafeController", "Switch"]

logger = logging.getLogger("forerun.control")

PLAIN = Plan()
NUM_IN_A_ROW = NUM_COLD + 1
"""Plain steps that are made together; the last is measured, since drafting leaves cold caches."""

StepKind = Literal["plain", "speculative", "probe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """Record of a switch of speculation to on or off.

    Attributes:
        step: number of the step.
        bucket: batch sizes it holds for, as an exponent of 2.
        on: whether speculation is on from now on.
        reason: the measurement behind it.
    """

    step: int
    bucket: int
    on: bool
    reason: str


class SpeedupBucket:
    """Measured speed with and without speculation, at batch sizes between two powers of two.

    Args:
        config: of the safety.
    """

    __slots__ = ("gap", "num_failures", "off_since", "on", "plain", "since_plain", "speculative")

    def __init__(self, config: SafetyConfig) -> None:
        self.plain = DiscountedRatio(config.plain_memory)
        self.speculative = DiscountedRatio(config.memory)
        self.on = True
        self.off_since = 0
        self.since_plain = 0
        self.gap = FIRST_PLAIN_GAP
        """Speculative steps after which plain ones are made."""
        self.num_failures = 0

    def bounds(self, z: float) -> tuple[float, float]:
        """Return confidence bounds of the ratio of speeds with and without speculation."""
        speedup = self.speculative.ratio / self.plain.ratio
        error = z * math.hypot(self.speculative.relative_error, self.plain.relative_error)
        return speedup * (1.0 - error), speedup * (1.0 + error)


class SafeController:
    """Follows the plans of another controller, except where plain decoding is faster.

    Args:
        inner: the controller whose plans are followed.
        config: settings.

    Attributes:
        switches: the last times that speculation was turned on or off.
        num_switches: all of them, "on" and "off".
        num_probes: steps made plain to measure plain decoding.
    """

    def __init__(self, inner: Controller, config: SafetyConfig | None = None) -> None:
        self.inner = inner
        self.config = config or SafetyConfig()
        self.switches: list[Switch] = []
        self.num_switches: Counter[str] = Counter()
        self.num_probes = 0
        self.num_steps = 0
        self._buckets: dict[int, SpeedupBucket] = {}
        self._inner_plans: list[Plan] = []
        self._kind: StepKind = "plain"
        self._name = 0
        self._made: StepKind | None = None
        self._num_measuring = 0
        self._num_plain = 0
        self._wants_drafts = False

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> list[Plan]:
        """Return the plans of the inner controller, or plain ones while speculation is off."""
        plans = self.inner.decide(states, capacity)
        self._made = None
        if not states:
            return plans
        self.num_steps += 1
        if plans is not self._inner_plans or len(plans) != len(states):
            self._inner_plans, self._kind = plans, kind_of(plans)
        name = bucket_of(states)
        self._name = name
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = SpeedupBucket(self.config)
        kind = self._kind
        if kind == "speculative":
            if not bucket.on and self.num_steps >= self._ends_at(bucket):
                self._switch(name, bucket, on=True, reason="tried again")
            if self._num_measuring == 0 and bucket.on and bucket.since_plain >= bucket.gap:
                missing = self.config.num_plain - bucket.plain.num_pairs
                self._num_measuring = NUM_IN_A_ROW + max(0, missing - 1)
                self.num_probes += self._num_measuring
            if self._num_measuring or not bucket.on:
                kind = "plain"
        elif kind == "probe" and (self._num_measuring or (not bucket.on and self._wants_drafts)):
            kind = "plain"  # it would end a measurement, or be one token more than what is too slow
        if kind != "probe":
            self._wants_drafts = self._kind == "speculative"
        self._num_measuring = max(0, self._num_measuring - 1)
        self._made = kind
        return plans if kind == self._kind else [PLAIN] * len(plans)

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Measure the step, and switch speculation by the bounds of the speedup."""
        self.inner.observe(records)
        kind, self._made = self._made, None
        if kind is None or not records or len(records) != len(self._inner_plans):
            return
        drafted = any(record.num_drafted for record in records)
        self._num_plain = 0 if drafted else self._num_plain + 1
        bucket, first = self._buckets[self._name], records[0]
        bucket.since_plain += kind == "speculative"
        if first.num_prefill_rows or kind == "probe":
            return  # probes are made to learn, and are known to be slower
        seconds = first.draft_s + first.verify_s + first.other_s
        tokens = float(sum(record.num_accepted + 1 for record in records))
        if kind == "speculative":
            bucket.speculative.observe(seconds, tokens)
            self._judge(self._name, bucket)
        elif not bucket.plain.num_pairs or self._num_plain >= NUM_IN_A_ROW:
            bucket.plain.observe(seconds, tokens)
            bucket.since_plain, bucket.gap = 0, self._gap()

    def _judge(self, name: int, bucket: SpeedupBucket) -> None:
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

    def _turn_off(self, name: int, bucket: SpeedupBucket, reason: str) -> None:
        bucket.off_since = self.num_steps
        bucket.num_failures += 1
        bucket.speculative = DiscountedRatio(self.config.memory)
        self._switch(name, bucket, on=False, reason=reason)

    def _ends_at(self, bucket: SpeedupBucket) -> int:
        """Return the step from which speculation may be tried again."""
        config = self.config
        pause: int = config.retry_after << min(16, max(0, bucket.num_failures - 1))
        return bucket.off_since + min(pause, config.longest_retry)

    def _gap(self) -> int:
        """Return the number of speculative steps before the next plain ones."""
        share = share_of(finalise(~self.num_probes * INCREMENT))
        return 1 + int(2.0 * NUM_IN_A_ROW * share / self.config.probe_share)

    def _switch(self, name: int, bucket: SpeedupBucket, *, on: bool, reason: str) -> None:
        bucket.on = on
        self.num_switches["on" if on else "off"] += 1
        self.switches.append(Switch(step=self.num_steps, bucket=name, on=on, reason=reason))
        del self.switches[:-MAX_SWITCHES]
        logger.info(
            "speculation %s at batch %d to %d: %s",
            "on" if on else "off",
            2**name,
            2 ** (name + 1) - 1,
            reason,
        )


def kind_of(plans: Sequence[Plan]) -> StepKind:
    """Return "probe" if any plan is a probe, otherwise whether any plan drafts."""
    kind: StepKind = "plain"
    for plan in plans:
        if plan.probe:
            return "probe"
        if plan.num_speculative_tokens:
            kind = "speculative"
    return kind


def bucket_of(states: Sequence[RequestState]) -> int:
    """Return the binary logarithm of the batch size, rounded down."""
    return len(states).bit_length() - 1
