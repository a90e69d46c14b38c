"""Controller that treats drafters and K as bandit arms and needs no cost or acceptance model.

Source: discounted UCB (Garivier and Moulines 2008); bandits over configurations of speculation are
those of BanditSpec (2505.15141). One bandit per batch size, since all requests of a step share it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from forerun.control.base import Capacity, Plan, RequestState
from forerun.control.config import BanditConfig
from forerun.theory.record import StepRecord

__all__ = ["BanditController"]


class BanditArm(NamedTuple):
    """One configuration that a bandit may choose: a drafter and K."""

    method: str
    k: int


class ArmTotals:
    """Discounted steps, tokens and seconds of one arm."""

    __slots__ = ("num_steps", "seconds", "tokens")

    def __init__(self) -> None:
        self.num_steps = self.tokens = self.seconds = 0.0

    def fade(self, memory: float) -> None:
        """Multiply the totals by `memory`, the weight of past steps after each new step."""
        self.num_steps *= memory
        self.tokens *= memory
        self.seconds *= memory


class BanditController:
    """Chooses the configuration with the highest upper confidence bound on tokens per second.

    Args:
        methods: names of the drafters.
        max_k: largest K; larger ones of the configuration are left out.
        config: what to choose from, and how boldly.
    """

    def __init__(
        self, methods: Sequence[str], max_k: int, config: BanditConfig | None = None
    ) -> None:
        self.config = config or BanditConfig()
        ks = sorted({min(k, max_k) for k in self.config.ks if k > 0} - {0})
        self.arms = (
            *((BanditArm("plain", 0),) if 0 in self.config.ks else ()),
            *(BanditArm(method, k) for method in methods for k in ks),
        )
        self._plays: dict[int, dict[BanditArm, ArmTotals]] = {}
        self._playing: tuple[int, BanditArm] | None = None

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> list[Plan]:
        """Return the plan of the chosen arm for every request."""
        if not states:
            return []
        batch = len(states)
        share = capacity.max_rows // batch - 1
        plays = self._plays.setdefault(batch, {arm: ArmTotals() for arm in self.arms})
        arm = self._best([arm for arm in self.arms if arm.k <= max(0, share)], plays)
        if arm is None or arm.k == 0:
            self._playing = None if arm is None else (batch, arm)
            return [Plan()] * batch
        self._playing = batch, arm
        return [Plan.chain(arm.method, arm.k)] * batch

    def _best(
        self, arms: Sequence[BanditArm], plays: dict[BanditArm, ArmTotals]
    ) -> BanditArm | None:
        """Return the arm with the highest upper confidence bound; arms never played come first."""
        fresh = next((arm for arm in arms if plays[arm].seconds == 0.0), None)
        if fresh is not None or not arms:
            return fresh
        rates = {arm: plays[arm].tokens / plays[arm].seconds for arm in arms}
        num_steps = sum(plays[arm].num_steps for arm in arms)
        width = self.config.width * max(rates.values()) * math.sqrt(max(0.0, math.log(num_steps)))
        return max(arms, key=lambda arm: rates[arm] + width / math.sqrt(plays[arm].num_steps))

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Add the step to the totals of its arm, unless the step also read prompts."""
        if self._playing is None or not records:
            return
        batch, arm = self._playing
        first = records[0]
        if first.num_prefill_rows or len(records) != batch:
            return
        plays = self._plays[batch]
        for play in plays.values():
            play.fade(self.config.memory)
        play = plays[arm]
        play.num_steps += 1.0
        play.tokens += sum(record.num_accepted + 1 for record in records)
        play.seconds += first.draft_s + first.verify_s + first.other_s
