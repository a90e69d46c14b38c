"""Schedules of drafting and verification: one after the other, or overlapped on two devices.

The engine uses the first; the overlapped ones are alternatives. They assume that draft and target
run at the same time without slowing each other, which takes two devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from forerun.plan.simulation.request import SimulatedCycle, SimulatedRequest
from forerun.plan.simulation.times import CycleTimes

__all__ = ["SCHEDULES", "Early", "Pearl", "Schedule", "Sequential"]


class Sequential:
    """Drafts, then verifies, as the engine does."""

    def num_rows(
        self, decoding: Sequence[SimulatedRequest], drafting: Sequence[SimulatedRequest]
    ) -> int:
        """Return the rows of the pass: a pending token per request, and the drafted ones."""
        return len(decoding) + sum([request.depth for request in drafting])

    def advance(self, request: SimulatedRequest) -> int:
        """Verify a draft and return the tokens gained: the accepted ones and one more."""
        request.num_tested = request.depth
        request.num_accepted = request.accepted_of(request.depth)
        return request.num_accepted + 1

    def spend(
        self, cycle: SimulatedCycle, times: CycleTimes, requests: Sequence[SimulatedRequest]
    ) -> None:
        """Set the durations of a cycle in which at least one request drafts."""
        drafting = levels(requests)
        cycle.draft_s += sum(times.draft_s[b] for b in drafting)
        cycle.verify_s = times.pass_s(cycle.num_decode_rows)
        cycle.other_s = times.overhead_s(len(drafting))


class Early(Sequential):
    """Verifies the first drafted token while the others are drafted, and drops them if rejected.

    Source: the pre-verification of PEARL (Liu et al. 2024, 2408.11850).
    """

    def spend(
        self, cycle: SimulatedCycle, times: CycleTimes, requests: Sequence[SimulatedRequest]
    ) -> None:
        """Add the first draft, the longer of its pass and the other drafts, and their pass."""
        first, *others = (times.draft_s[b] for b in levels(requests))
        alive = sum(request.depth > 1 and request.num_accepted > 0 for request in requests)
        num_later = sum(request.depth - 1 for request in requests if request.num_accepted)
        num_first = cycle.num_decode_rows - sum(max(0, request.depth - 1) for request in requests)
        check_s = times.pass_s(num_first)
        if alive:
            cycle.draft_s += first + max(0.0, sum(others) - check_s)
            cycle.verify_s = check_s + times.pass_s(num_later)
        else:
            cycle.draft_s += first
            cycle.verify_s = check_s
        cycle.other_s = times.overhead_s(1 + len(others))


class Pearl(Sequential):
    """Drafts on while the last tokens are verified, and keeps the new ones if all are accepted.

    A pass verifies the tokens that wait and the first of the new ones, whose distribution it has
    anyway. After a rejection nothing waits, and the pass verifies the first new token alone.

    Source: PEARL (Liu et al. 2024, 2408.11850).
    """

    def num_rows(
        self, decoding: Sequence[SimulatedRequest], drafting: Sequence[SimulatedRequest]
    ) -> int:
        """Return the rows of the pass: a pending token per request, and the waiting ones."""
        return len(decoding) + sum([request.num_ahead for request in drafting])

    def advance(self, request: SimulatedRequest) -> int:
        """Return the tokens gained: up to the first rejection, or all that were verified."""
        if not request.depth:
            return 1
        left = request.num_output - request.num_emitted
        tested = request.num_tested = min(request.num_ahead + 1, left)
        request.num_accepted = request.accepted_of(tested)
        if request.num_accepted < tested:
            request.num_ahead = 0
            return request.num_accepted + 1
        request.num_ahead = request.depth - 1
        return tested

    def spend(
        self, cycle: SimulatedCycle, times: CycleTimes, requests: Sequence[SimulatedRequest]
    ) -> None:
        """Add the longer of drafting and verification."""
        drafting = levels(requests)
        draft_s = cycle.draft_s + sum(times.draft_s[b] for b in drafting)
        cycle.verify_s = times.pass_s(cycle.num_decode_rows)
        cycle.draft_s = max(0.0, draft_s - cycle.verify_s)
        cycle.other_s = times.overhead_s(len(drafting))


Schedule = Sequential | Early | Pearl

SCHEDULES: Mapping[str, Callable[[], Schedule]] = MappingProxyType(
    {"none": Sequential, "early": Early, "pearl": Pearl}
)
"""Schedules by the name of the overlap."""


def levels(requests: Sequence[SimulatedRequest]) -> list[int]:
    """Return how many requests draft each level."""
    depths = [request.depth for request in requests]
    if min(depths) == max(depths):
        return [len(depths)] * depths[0]
    return [sum(depth > level for depth in depths) for level in range(max(depths))]
