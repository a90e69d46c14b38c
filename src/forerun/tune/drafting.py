"""How far drafts were accepted, by the engine's own counters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from forerun.client.client import Timings
from forerun.doctor.readers.prometheus import metrics_of, read_page


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
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

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "acceptance_length": self.acceptance_length}


def compare_pages(before: str, after: str) -> Drafting | None:
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
        return Drafting(
            num_drafts=steps,
            num_drafted=round(steps * size),
            num_accepted=max(0, num_tokens - steps),
        )
    if "num_accepted" not in tally.counts:
        return None
    return Drafting(
        num_drafts=round(tally.counts.get("num_drafts", 0.0)),
        num_drafted=round(tally.counts.get("num_drafted", 0.0)),
        num_accepted=round(tally.counts["num_accepted"]),
        accepted_per_position=tuple(map(round, tally.per_position)),
    )


def sum_timings(timings: Iterable[Timings]) -> Drafting | None:
    """Return what llama.cpp drafted, from the last event of every streamed answer.

    Its answers do not tell how many steps drafted: every step counts as one that did, so the
    acceptance length is that of all steps.
    """
    rows = list(timings)
    accepted = sum(row.draft_n_accepted for row in rows)
    if not any(row.draft_n for row in rows):
        return None
    return Drafting(
        num_drafts=max(1, sum(row.predicted_n for row in rows) - accepted),
        num_drafted=sum(row.draft_n for row in rows),
        num_accepted=accepted,
    )
