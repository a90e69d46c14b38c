"""Cost tables of a target with a drafter: as measured, or changed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from forerun.theory.cost import CostLine, CostTable, ReadingCost


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCosts:
    """Cost tables of one target and drafter, for greedy and for sampled drafts."""

    greedy: CostTable
    sampled: CostTable
    reading: ReadingCost | None = None

    def at(self, temperature: float) -> CostTable:
        """Return the table that holds at a temperature."""
        return self.greedy if temperature == 0 else self.sampled


def with_draft_cost(table: CostTable, draft_s: float, overhead_s: float | None = None) -> CostTable:
    """Return the cost tables of the same target with another drafter.

    Args:
        draft_s: seconds of every drafted token, at every batch size.
        overhead_s: seconds of a cycle beyond drafting and the pass, for every K and batch; None
            leaves those of the table.
    """
    changes: dict[str, Any] = {"draft_s": draft_s, "draft_error_s": 0.0}
    if overhead_s is not None:
        changes |= {"overhead_ks": (1,), "overhead_s": (overhead_s,), "overhead_error_s": ()}
    return CostTable(lines=tuple(replace(line, **changes) for line in table.lines))


def with_batches(table: CostTable, batches: Iterable[int]) -> CostTable:
    """Return a cost table extended to batch sizes beyond the largest measured one.

    The time of a pass depends little on which sequence a row belongs to. So n times the sequences
    are taken to cost what n times the rows of the largest measured batch cost, and a draft's pass
    to grow as the target's does. The time to read the keys and values of more sequences is left
    out, so large batches look faster than a measurement would show.
    """
    largest = table.batches[-1]
    wanted = sorted({batch for batch in batches if batch > largest})
    measured = [line for line in table.lines if line.batch == largest]
    return CostTable(
        lines=(*table.lines, *(grown(line, batch) for batch in wanted for line in measured))
    )


def grown(line: CostLine, batch: int) -> CostLine:
    """Estimate a line of the cost table at a larger batch size from its times by rows."""
    times = batch / line.batch
    passes = [line.verify(math.ceil(rows * times)) for rows in line.rows]
    factor = passes[0].s / line.verify(1).s
    return replace(
        line,
        batch=batch,
        verify_s=tuple(reading.s for reading in passes),
        verify_error_s=tuple(reading.error_s for reading in passes),
        plain_s=line.plain_s + passes[0].s - line.verify(1).s,
        draft_s=line.draft_s * factor,
        draft_error_s=line.draft_error_s * factor,
    )
