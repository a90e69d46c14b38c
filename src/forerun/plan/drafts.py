"""Depths of traced drafts (allowed, drafted, accepted), and estimates for a smaller K.

A draft of which five tokens were accepted shows how shorter ones would have fared: with K = 2 the
same text takes two steps, of which the first accepts both of its tokens, and the bonus token stands
where the third one stood. So a smaller K begins more often after tokens that were easy, and its
tau is not that of the first positions of longer drafts, which begin after a rejection.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from forerun.theory.acceptance import AcceptanceCounts


@dataclass(slots=True)
class Drafts:
    """Counts the steps of one or more requests; `a + b` merges two objects.

    Attributes:
        steps: number of steps per (depth that was allowed, depth drafted, tokens accepted).
    """

    steps: Counter[tuple[int, int, int]] = field(default_factory=Counter)

    def add(self, allowed: int, depth: int, num_accepted: int) -> None:
        """Count one step.

        Raises:
            ValueError: more was accepted than drafted, or drafted than allowed.
        """
        if not 0 <= num_accepted <= depth <= allowed:
            raise ValueError(
                f"step that accepted {num_accepted} of {depth} where {allowed} were allowed; they "
                "must be non-negative and in this order"
            )
        self.steps[allowed, depth, num_accepted] += 1

    def __add__(self, other: Drafts) -> Drafts:
        return Drafts(self.steps + other.steps)

    @property
    def accepted(self) -> AcceptanceCounts:
        """Return acceptance counts by allowed depth; undrafted positions count as rejected."""
        return self._counts(depth_counts=False)

    @property
    def drafted(self) -> AcceptanceCounts:
        """Return counts like `accepted`, but of drafted instead of accepted tokens."""
        return self._counts(depth_counts=True)

    def limited(self, num_speculative_tokens: int) -> Drafts:
        """Return the steps that the same texts would take with at most this K.

        This is exact where a draft goes on after its bonus token as the longer one did: greedy
        drafts do, and sampled ones do in distribution if verification decides token by token.
        """
        k = num_speculative_tokens
        found: Counter[tuple[int, int, int]] = Counter()
        for (allowed, depth, accepted), n in self.steps.items():
            num_whole, left = divmod(accepted, k + 1)
            if num_whole:
                found[k, k, k] += n * num_whole
            used = num_whole * (k + 1)
            if allowed > used or not num_whole:
                found[min(k, allowed - used), min(k, depth - used), left] += n
        return Drafts(found)

    def _counts(self, *, depth_counts: bool) -> AcceptanceCounts:
        counts = AcceptanceCounts()
        for (allowed, depth, accepted), n in self.steps.items():
            counts.steps[allowed, depth if depth_counts else accepted] += n
            counts.num_drafted += n * allowed
        return counts
