"""Figures of the latest steps in bounded memory, with one group of steps per active second."""

from __future__ import annotations

import math
from functools import reduce
from operator import add

from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.figures import (
    MIN_PLAIN_GROUPS,
    Group,
    Grouping,
    PlainComparison,
    compare_with_plain,
    find_baselines,
    observe_plain,
)
from forerun.theory.intervals import DiscountedRatio

HISTORY_S = 120
"""Seconds with activity that are kept."""
WINDOW_S = 60
"""Seconds with activity over which acceptance and times are averaged."""
RECENT_S = 10.0
"""Seconds over which the rate of tokens is averaged."""
PLAIN_MEMORY = 0.95
"""Weight that a second with plain steps keeps in the baseline after one more."""


class LiveFigures(Grouping):
    """Averages the latest steps; memory does not grow with the number of steps.

    The baseline of plain steps comes from the same seconds as the steps, because other programs may
    slow both for a while; where these have none, from those before them. Steps of one second are
    slow or fast together, so that seconds, not steps, show the error.
    """

    def __init__(self) -> None:
        super().__init__(lambda record: math.floor(record.t_s), HISTORY_S)
        self._earlier: dict[int, DiscountedRatio] = {}

    def begin_group(self, key: float) -> None:
        if self.groups:
            observe_plain(self._earlier, self.groups[-1][1], PLAIN_MEMORY)
        super().begin_group(key)

    def compare(self) -> PlainComparison:
        """Compare the steps in the window with plain ones."""
        earlier = {
            size: ratio
            for size, ratio in self._earlier.items()
            if ratio.num_pairs >= MIN_PLAIN_GROUPS
        }
        latest = find_baselines(group for _, group in self.groups)
        return compare_with_plain(self.window, earlier | latest)

    @property
    def window(self) -> list[Group]:
        """Return the groups over which figures are averaged."""
        return [group for _, group in self.groups][-WINDOW_S:]

    @property
    def counts(self) -> AcceptanceCounts:
        """Return the counts of drafting steps in the window."""
        counts = (group.acceptance for group in self.window)
        return reduce(add, counts, AcceptanceCounts()).drafting

    def tokens_per_s(self, now_s: float) -> float:
        """Return the tokens per second of the last seconds, idle time included."""
        recent = [(s, group) for s, group in self.groups if s > now_s - RECENT_S]
        if not recent:
            return 0.0
        seconds = max(1.0, min(RECENT_S, now_s - recent[0][0]))
        return sum(group.num_tokens for _, group in recent) / seconds

    def points(self, now_s: float) -> list[dict[str, object]]:
        """Return the points of the page's history plot; K is the mean of the plans."""
        return [
            {
                "age_s": max(0.0, now_s - second),
                "tokens_per_s": float(group.num_tokens),
                "num_speculative_tokens": group.sum_k / group.acceptance.num_steps,
                "methods": dict(group.methods),
            }
            for second, group in self.groups
        ]
