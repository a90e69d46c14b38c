"""Settings of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from forerun.errors import InvalidRequest, Range, check_ranges

RANGES = (
    Range("context", 0, integer=True),
    Range("temperature", 0),
    Range("max_k", 1, high=1024, integer=True),
    Range("slo_tpot_s", 0, above_low=True, optional=True),
    Range("sibling_acceptance", 0, high=1, optional=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """The batch sizes, context and limits that a plan is for.

    Attributes:
        batches: sequences at once that are considered, ascending.
        context: committed tokens of every sequence, about halfway through its output.
        temperature: 0 for greedy drafts, above for sampled ones.
        slo_tpot_s: most seconds per output token (None: no limit).
        sibling_acceptance: P(a further child of a node of a draft tree is accepted | those before
            it are not); None plans chains only.
    """

    batches: tuple[int, ...]
    context: int
    temperature: float = 0.0
    max_k: int = 16
    slo_tpot_s: float | None = None
    sibling_acceptance: float | None = None

    def __post_init__(self) -> None:
        check_ranges(self, *RANGES)
        ascending = all(before < after for before, after in pairwise(self.batches))
        if not self.batches or self.batches[0] < 1 or not ascending:
            raise InvalidRequest(
                f"batches is {list(self.batches)}; it must ascend from 1 or more, each once"
            )
