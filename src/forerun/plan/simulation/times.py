"""Durations of cycles, read from a cost table once per batch size and context."""

from __future__ import annotations

from forerun.theory.cost import CostTable
from forerun.theory.reading_cost import ReadingCost

CONTEXT_BUCKET = 64
"""Tokens of mean context that share one reading of the table."""


class CycleTimes:
    """Times of a cost table at one batch size and context, as plain numbers.

    Args:
        table: cost table of drafter and target.
    """

    __slots__ = (
        "_batch", "_context", "_most_rows", "_overheads_s", "_rows_s", "_table", "draft_s",
        "plain_s",
    )  # fmt: skip

    def __init__(self, table: CostTable, batch: int, context: int) -> None:
        self._table = table
        self._batch = batch
        self._context = context
        self._most_rows = max(line.rows[-1] for line in table.lines)
        self._rows_s: dict[int, float] = {}
        self._overheads_s: dict[int, float] = {}
        self.plain_s = table.plain_step_s(context, batch)
        self.draft_s = [0.0, *(table.draft_token_s(context, b + 1) for b in range(batch))]
        """Seconds of one more drafted level, by the number of sequences that draft it."""

    def pass_s(self, num_rows: int) -> float:
        """Return the seconds of a target pass, interpolated between whole rows per sequence."""
        batch, most = self._batch, self._most_rows
        if num_rows <= batch:
            return self._even_s(1)
        if num_rows >= batch * most:  # from there on every line of the table is proportional
            return self._even_s(most) * num_rows / (batch * most)
        rows, rest = divmod(num_rows, batch)
        below = self._even_s(rows)
        return below + rest / batch * (self._even_s(rows + 1) - below) if rest else below

    def overhead_s(self, depth: int) -> float:
        """Return the seconds of a cycle with `depth` levels beyond drafting and target pass."""
        found = self._overheads_s.get(depth)
        if found is None:
            found = self._table.overhead_s(depth, self._context, self._batch)
            self._overheads_s[depth] = found
        return found

    def _even_s(self, rows: int) -> float:
        found = self._rows_s.get(rows)
        if found is None:
            found = self._table.verify_step_s(rows, self._context, self._batch)
            self._rows_s[rows] = found
        return found


class Times:
    """Holds cycle times by batch size and bucket of contexts.

    Args:
        table: cost table of drafter and target.
        reading: cost of reading prompts; None: estimated from the table.
    """

    def __init__(self, table: CostTable, reading: ReadingCost | None = None) -> None:
        self.table = table
        self.reading = reading or _reading_as_verified(table)
        self._found: dict[tuple[int, int], CycleTimes] = {}

    def at(self, batch: int, num_tokens: int) -> CycleTimes:
        """Return the times of cycles at a batch size and context."""
        bucket = num_tokens // (batch * CONTEXT_BUCKET)
        found = self._found.get((batch, bucket))
        if found is None:
            context = bucket * CONTEXT_BUCKET + CONTEXT_BUCKET // 2
            found = self._found[batch, bucket] = CycleTimes(self.table, batch, context)
        return found


def _reading_as_verified(table: CostTable) -> ReadingCost:
    """Estimate reading costs by verification of as many rows, which is an upper bound.

    The target is taken to read as it verifies, and the draft to read for as much less as a drafted
    token costs less than a plain step.
    """
    rows = table.lines[0].rows
    share = table.draft_cost()
    target_s = tuple(table.verify_step_s(num_rows) for num_rows in rows)
    draft_s = tuple(share * seconds for seconds in target_s)
    return ReadingCost(tokens=rows, target_s=target_s, draft_s=draft_s)
