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
    growth = read_page(after).metrics.since(read_page(before).metrics)
    tally = metrics_of(growth)
    counts = {name: round(count) for name, count in tally.counts.items()}
    if "num_accepted" in counts:
        return Drafting(
            num_drafts=counts.get("num_drafts", 0),
            num_drafted=counts.get("num_drafted", 0),
            num_accepted=counts["num_accepted"],
            accepted_per_position=tuple(map(round, tally.per_position)),
        )
    return None


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
