"""Steps in which nobody asks the controller: beside a small model, asking costs time.

Of steps that were planned together the last is told: it was not asked about, which costs time as
well, and caches have settled by then.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.control.base import Capacity, Plan

__all__ = ["Unasked"]


class Unasked:
    """Follows plain plans for as many steps as they allow, while the same requests are there.

    Args:
        max_rows: rows a pass may take.
    """

    def __init__(self, max_rows: int) -> None:
        self._capacity = Capacity(max_rows=max_rows)
        self._who: list[object] = []
        self._steps_left = 0
        self._num_steps = 1

    def goes_on(self, who: Sequence[object]) -> bool:
        """Whether this step is plain for all, as it was planned before.

        Args:
            who: all that run, the same kind of sequence as was followed.
        """
        if self._steps_left > 0 and self._who == who:
            self._steps_left -= 1
            self._num_steps += 1
            return True
        self._who, self._steps_left = [], 0
        return False

    @property
    def tells(self) -> bool:
        """Whether the controller is told what came of this step: the last that it planned."""
        return self._steps_left == 0

    @property
    def capacity(self) -> Capacity:
        """What the controller is told when it is asked."""
        if self._num_steps == 1:
            return self._capacity
        return Capacity(max_rows=self._capacity.max_rows, num_steps=self._num_steps)

    def follow(self, who: Sequence[object], plans: Sequence[Plan]) -> None:
        """See what was planned.

        Args:
            who: all that run.
            plans: of those who were asked; where somebody was not, all are asked again.
        """
        self._num_steps, self._steps_left = 1, 0
        if len(plans) == len(who):
            drafts = any([plan.num_speculative_tokens for plan in plans])
            self._steps_left = 0 if drafts else min([plan.num_steps for plan in plans]) - 1
        self._who = list(who) if self._steps_left > 0 else []
