"""How far drafts were accepted, by the engine's own counters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from forerun.doctor.readers.prometheus import metrics_of, read_page
from forerun.tune.server import TimedAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingCounts:
    """Counts of drafting.

    Attributes:
        num_drafts: steps that drafted, of every sequence.
        num_drafted: draft tokens.
        num_accepted: of them.
        accepted_per_position: steps that accepted through a position; empty if the engine does
            not count them.
    """

    num_drafts: int
    num_drafted: int
    num_accepted: int
    accepted_per_position: tuple[int, ...] = ()

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per step that drafted; None without any."""
        return 1.0 + self.num_accepted / self.num_drafts if self.num_drafts else None


def compare_pages(before: str, after: str) -> DraftingCounts | None:
    """Return what an engine drafted between two readings of its metrics page.

    Returns:
        None if the page counts no drafts.
    """
    page = read_page(after).metrics
    growth = page.since(read_page(before).metrics)
    tally = metrics_of(growth)
    steps = round(growth.totals.get("sglang:spec_verify_calls", 0.0))
    if steps:  # SGLang counts no drafts, but every step of a sequence drafts one of a fixed size
        size = page.totals.get("sglang:spec_num_draft_tokens", 1.0) - 1.0
        num_tokens = round(growth.totals.get("sglang:generation_tokens", 0.0))
        return DraftingCounts(
            num_drafts=steps,
            num_drafted=round(steps * size),
            num_accepted=max(0, num_tokens - steps),
        )
    if "num_accepted" not in tally.counts:
        return None
    return DraftingCounts(
        num_drafts=round(tally.counts.get("num_drafts", 0.0)),
        num_drafted=round(tally.counts.get("num_drafted", 0.0)),
        num_accepted=round(tally.counts["num_accepted"]),
        accepted_per_position=tuple(map(round, tally.per_position)),
    )


def find_drafting(
    answers: Sequence[TimedAnswer], before: str | None, after: str | None
) -> DraftingCounts | None:
    """Return what was drafted for answers: by their own counts, or by the metrics page.

    Args:
        before: the page before the first request, and `after` that after the last one; None where
            the server has none.

    Returns:
        None if the server counts no drafts.
    """
    counted = [
        DraftingCounts(
            num_drafts=answer.num_drafts or 0,
            num_drafted=answer.num_drafted,
            num_accepted=answer.num_accepted or 0,
        )
        for answer in answers
        if answer.num_drafted is not None
    ]
    if counted or before is None or after is None:
        return sum_drafting(counted)
    return compare_pages(before, after)


def sum_drafting(parts: Iterable[DraftingCounts | None]) -> DraftingCounts | None:
    """Return the sum of counts; None if there are none."""
    counted = [part for part in parts if part is not None]
    if not counted:
        return None
    places = zip_longest(*(part.accepted_per_position for part in counted), fillvalue=0)
    return DraftingCounts(
        num_drafts=sum(part.num_drafts for part in counted),
        num_drafted=sum(part.num_drafted for part in counted),
        num_accepted=sum(part.num_accepted for part in counted),
        accepted_per_position=tuple(map(sum, places)),
    )
