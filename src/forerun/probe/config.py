"""Settings of a profile; torch-free, so that the command line can read them cheaply."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from forerun.errors import InvalidRequest

__all__ = ["THOROUGH", "ProbeConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeConfig:
    """What is measured, and until when.

    Attributes:
        rows: rows per sequence of a target pass; a verify pass at K has K + 1.
        batches: sequences at once.
        contexts: committed tokens of every sequence.
        drafted: K of the greedy chains and of the engine steps; a straight line through them tells
            what a drafted token adds, and what is left what else a cycle takes at each.
        read: tokens of one sequence in a pass that reads them; fewer than two sizes: reading is not
            measured.
        max_pass_rows: passes of more rows, over all sequences, are left out.
        target_error: done when half of every 95% interval is below this share of its estimate,
            which takes at least six samples of each.
        min_rounds: rounds measured whatever the time.
        budget_s: no new round is begun after so many seconds of measuring.
    """

    rows: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64)
    batches: tuple[int, ...] = (1, 8)
    contexts: tuple[int, ...] = (64, 512)
    drafted: tuple[int, ...] = (1, 4)
    read: tuple[int, ...] = (1, 64, 256)
    max_pass_rows: int = 128
    target_error: float = 0.02
    min_rounds: int = 3
    budget_s: float = 12.0

    def __post_init__(self) -> None:
        """Refuse values that cannot work, by name."""
        for name in ("rows", "batches", "contexts", "drafted"):
            values = getattr(self, name)
            if not values or values[0] < 1 or any(b <= a for a, b in pairwise(values)):
                raise InvalidRequest(f"{name} is {list(values)}; it must ascend from 1 or more")
        if any(b <= a for a, b in pairwise((0, *self.read))) or self.read[:1] not in ((), (1,)):
            raise InvalidRequest(f"read is {list(self.read)}; it must ascend from 1, or be empty")
        if self.rows[0] != 1:
            raise InvalidRequest(f"rows is {list(self.rows)}; it must begin at 1, a plain pass")
        if self.max_pass_rows < self.batches[-1] * (self.drafted[-1] + 1):
            raise InvalidRequest(
                f"max_pass_rows is {self.max_pass_rows}, below {self.batches[-1]} sequences of "
                f"{self.drafted[-1] + 1} rows; raise it, or lower batches or drafted"
            )
        if self.min_rounds < 1:
            raise InvalidRequest(f"min_rounds is {self.min_rounds}; it must be at least 1")
        for name in ("target_error", "budget_s"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be above 0")


THOROUGH = ProbeConfig(
    rows=tuple(range(1, 65)),
    batches=(1, 2, 4, 8, 16),
    contexts=(64, 256, 512, 896),
    drafted=(1, 2, 4, 8),
    max_pass_rows=256,
    target_error=0.01,
    min_rounds=6,
    budget_s=300.0,
)
"""Every row count, more batches and contexts: minutes instead of seconds."""
