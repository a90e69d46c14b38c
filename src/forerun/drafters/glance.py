"""How far back a probe reads, and what it says of the text that came while nobody drafted.

A probe that has much to catch up with glances at the last tokens alone. Looking back at what it has
read tells at once what a dozen probes would: where would the token that came have been proposed? A
useless draft shows there. Any other looks worse than it is, having read so little; where a glance
promises something, more is read at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.drafters.branch import Branch

__all__ = ["CLOSE_LOOK", "GLANCE", "Past"]

GLANCE, SAMPLED_GLANCE = 24, 48
"""Last tokens that a probe is drafted from where there is more to catch up with: more where only
its own token tells anything."""
CLOSE_LOOK = 256
"""The same where the draft promises something."""
PROMISING = 0.15
"""Share of the tokens looked back at which a draft must have right to promise something."""
UNASKED = 4
"""No draft is asked what comes next before it has read one in so many of a glance's tokens."""
LEAST_SEEN, MOST_SEEN = 8, 48
"""Tokens it takes to look back at, and the last that are."""


@dataclass(slots=True, eq=False)
class Past:
    """What was found out about a request's text by looking back.

    Attributes:
        until: of all tokens before this place it is known whether the draft would have proposed
            them.
        promises: the last look found that the draft might be good.
    """

    until: int = 0
    promises: bool = False

    def reach(self, branch: Branch) -> int:
        """Tokens that a probe reads at most."""
        if not branch.looks_back:
            return SAMPLED_GLANCE
        return CLOSE_LOOK if self.promises else GLANCE

    def places(self, branch: Branch) -> range:
        """What is looked back at: pending tokens, by their places in what the draft reads.

        Nothing where more than the most likely token matters: what the target has written then says
        little of what it would have accepted.
        """
        if not branch.looks_back:
            return range(0)
        length = len(branch.context.ids)
        unasked = min(self.reach(branch), length) // UNASKED
        first = max(unasked, branch.context.num_cached + 1, length - MOST_SEEN)
        return range(first, length) if length - first >= LEAST_SEEN else range(0)

    def look(self, branch: Branch, places: range, right: Sequence[bool]) -> bool:
        """See what a draft says of the tokens at these places, and whether that is all there is.

        Only what the target has written, and nobody has been told of, counts as evidence.

        Args:
            branch: as for `places`.
            places: that it gave.
            right: whether the draft would have proposed them.

        Returns:
            False where more should be read: then nothing is learnt from this.
        """
        num_ids = len(branch.request.ids)
        left_out = num_ids - len(branch.context.ids)
        known = max(branch.request.num_prompt, self.until)
        was_glance = not self.promises and left_out > 0
        self.promises = sum(right) >= PROMISING * len(right)
        if was_glance and self.promises and num_ids - known >= LEAST_SEEN:
            return False
        new = right[max(0, known - left_out - places.start) :]
        branch.hindsight = tuple(map(int, new)) or None
        self.see(num_ids)
        return True

    def see(self, until: int) -> None:
        """All before this place is known."""
        self.until = max(self.until, until)
