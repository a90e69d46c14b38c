"""What a cycle takes, read from a cost table once per place."""

from __future__ import annotations

from forerun.theory.cost import CostTable

__all__ = ["CycleTimes", "Times"]

CONTEXT_BUCKET = 64


class CycleTimes:
    """A cost table at one batch size and context, as plain numbers.

    Args:
        table: of drafter and target.
        batch: sequences in the pass.
        context: committed tokens of each.
    """

    __slots__ = (
        "_batch", "_context", "_most_rows", "_rows_s", "_table", "draft_s", "overhead_s", "plain_s",
    )  # fmt: skip

    def __init__(self, table: CostTable, batch: int, context: int) -> None:
        self._table = table
        self._batch = batch
        self._context = context
        self._most_rows = max(line.rows[-1] for line in table.lines)
        self._rows_s: dict[int, float] = {}
        self.plain_s = table.plain_step_s(context, batch)
        self.overhead_s = table.overhead(context, batch) * self.plain_s
        self.draft_s = [0.0, *(table.draft_token_s(context, b + 1) for b in range(batch))]
        """One more drafted level, by how many sequences draft it."""

    def pass_s(self, num_rows: int) -> float:
        """The target pass over so many rows in all, linear between whole rows per sequence."""
        batch, most = self._batch, self._most_rows
        if num_rows <= batch:
            return self._even_s(1)
        if num_rows >= batch * most:  # from there on every line of the table is proportional
            return self._even_s(most) * num_rows / (batch * most)
        rows, rest = divmod(num_rows, batch)
        below = self._even_s(rows)
        return below + rest / batch * (self._even_s(rows + 1) - below) if rest else below

    def _even_s(self, rows: int) -> float:
        found = self._rows_s.get(rows)
        if found is None:
            found = self._table.verify_step_s(rows, self._context, self._batch)
            self._rows_s[rows] = found
        return found


class Times:
    """Cycle times by place: batch, and a bucket of contexts.

    Args:
        table: of drafter and target.
    """

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._found: dict[tuple[int, int], CycleTimes] = {}
        self._alone = CycleTimes(table, 1, 0)
        self._share = self._alone.draft_s[1] / self._alone.plain_s

    def at(self, batch: int, num_tokens: int) -> CycleTimes:
        """Times of a pass.

        Args:
            batch: sequences in it.
            num_tokens: committed tokens of all of them.
        """
        bucket = num_tokens // (batch * CONTEXT_BUCKET)
        found = self._found.get((batch, bucket))
        if found is None:
            context = bucket * CONTEXT_BUCKET + CONTEXT_BUCKET // 2
            found = self._found[batch, bucket] = CycleTimes(self.table, batch, context)
        return found

    def reading_s(self, num_tokens: int) -> float:
        """The draft reads tokens it has missed.

        No profile has this. It is taken to cost as much less than in the target as a drafted token
        costs less than a plain step.
        """
        return self._share * (self._alone.pass_s(num_tokens) - self._alone.pass_s(1))
