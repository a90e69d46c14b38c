"""The cost table: measured times of drafting and verification, and interpolation between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forerun.theory.cost_line import CostLine, CostReading, interpolate
from forerun.theory.intervals import Interval
from forerun.theory.speedup import cycle_cost

Pick = Callable[[CostLine], CostReading]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Holds seconds per pass by rows per sequence, batch size and context length.

    A pass of batch B at K has B (K + 1) rows. Between measurements everything is linear in rows, in
    context and in batch.

    Outside them: rows as in `CostLine`. Beyond the longest context the last slope goes on, never
    downwards; below the shortest the shortest holds, and below the smallest batch the smallest.
    Beyond the largest batch a speculative cycle grows in proportion to the batch while the plain
    step goes on along its slope: an overestimate as well.

    Attributes:
        lines: one per batch size and context, for every pair of the two.
    """

    lines: tuple[CostLine, ...]

    def __post_init__(self) -> None:
        """Check that the lines make a grid."""
        found = [(line.batch, line.context) for line in self.lines]
        wanted = [(batch, context) for batch in self.batches for context in self.contexts]
        if not found or sorted(found) != wanted:
            raise ValueError(
                f"cost lines at (batch, context) {found}; there must be one per pair of "
                f"batches {self.batches} and contexts {self.contexts}"
            )

    @property
    def batches(self) -> tuple[int, ...]:
        """Return the measured batch sizes, ascending."""
        return tuple(sorted({line.batch for line in self.lines}))

    @property
    def contexts(self) -> tuple[int, ...]:
        """Return the measured context lengths, ascending."""
        return tuple(sorted({line.context for line in self.lines}))

    def verify_step_s(self, num_rows: int, context: int = 0, batch: int = 1) -> float:
        """Return the seconds of a target pass over `num_rows` rows of each sequence."""
        return self._verify(num_rows, context, batch).s

    def plain_step_s(self, context: int = 0, batch: int = 1) -> float:
        """Return the seconds of a plain step."""
        return self._plain(context, batch).s

    def draft_token_s(self, context: int = 0, batch: int = 1) -> float:
        """Return the seconds that one more drafted token adds to a cycle."""
        return self._in_cycle(lambda line: line.draft, context, batch).s

    def cycle_s(self, num_speculative_tokens: int, context: int = 0, batch: int = 1) -> float:
        """Return the seconds of a speculative cycle at K, or of a plain step for K = 0."""
        kappa = self.cycle_cost(num_speculative_tokens, context, batch)
        return kappa * self.plain_step_s(context, batch)

    def tree_cycle_s(
        self, num_nodes: int, depth: int, width: int, context: int = 0, batch: int = 1
    ) -> float:
        """Return the seconds of a cycle whose drafts are trees.

        A level below the first has `width` rows per sequence, which are taken to cost the draft
        what they cost the target, in proportion.
        """
        wide = self.verify_step_s(width, context, batch) / self.verify_step_s(1, context, batch)
        draft_s = self.draft_token_s(context, batch) * (1.0 + (depth - 1) * wide)
        verify_s = self.verify_step_s(num_nodes + 1, context, batch)
        return draft_s + verify_s + self.overhead_s(depth, context, batch)

    def verify_cost(self, num_rows: int, context: int = 0, batch: int = 1) -> float:
        """Return v(n), in plain steps."""
        return self.verify_step_s(num_rows, context, batch) / self.plain_step_s(context, batch)

    def draft_cost(self, context: int = 0, batch: int = 1) -> float:
        """Return c: the cost of one more drafted token, in plain steps."""
        return self.draft_token_s(context, batch) / self.plain_step_s(context, batch)

    def overhead_s(self, num_speculative_tokens: int, context: int = 0, batch: int = 1) -> float:
        """Return the seconds of a speculative cycle at K beyond drafting and the target pass."""
        return self._overhead(num_speculative_tokens, context, batch).s

    def overhead(self, num_speculative_tokens: int, context: int = 0, batch: int = 1) -> float:
        """Return o(K), in plain steps: the cycle beyond drafting and the target pass."""
        spent_s = self.overhead_s(num_speculative_tokens, context, batch)
        return spent_s / self.plain_step_s(context, batch)

    def cycle_cost(self, num_speculative_tokens: int, context: int = 0, batch: int = 1) -> float:
        """Return kappa = K c + v(K + 1) + o(K), or 1 for K = 0, which is plain decoding."""
        if num_speculative_tokens == 0:
            return 1.0
        return cycle_cost(
            num_speculative_tokens,
            draft_cost=self.draft_cost(context, batch),
            verify_cost=self.verify_cost(num_speculative_tokens + 1, context, batch),
            overhead=self.overhead(num_speculative_tokens, context, batch),
        )

    def verify_cost_interval(self, num_rows: int, context: int = 0, batch: int = 1) -> Interval:
        """Return v(n) with its 95% interval."""
        verify = self._verify(num_rows, context, batch)
        return _ratio(verify, self._plain(context, batch))

    def cycle_cost_interval(
        self, num_speculative_tokens: int, context: int = 0, batch: int = 1
    ) -> Interval:
        """Return kappa with its 95% interval; the errors of its parts are taken as independent."""
        if num_speculative_tokens == 0:
            return Interval(estimate=1.0, low=1.0, high=1.0)
        parts = (
            self._in_cycle(lambda line: line.draft, context, batch).times(num_speculative_tokens),
            self._verify(num_speculative_tokens + 1, context, batch),
            self._overhead(num_speculative_tokens, context, batch),
        )
        cycle = CostReading(
            s=math.fsum(part.s for part in parts),
            error_s=math.hypot(*(part.error_s for part in parts)),
        )
        return _ratio(cycle, self._plain(context, batch))

    def to_dict(self) -> dict[str, object]:
        """Return the measured values, ready for JSON."""
        return {"lines": [line.to_dict() for line in self.lines]}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> CostTable:
        """Return the table that `to_dict` wrote.

        Raises:
            ValueError: a field is missing, unknown or not of numbers, or the table is malformed.
        """
        if values.keys() != {"lines"}:
            raise ValueError(f"a cost table holds lines; this one has {', '.join(values)}")
        lines = values["lines"]
        if not isinstance(lines, list | tuple) or not all(isinstance(x, Mapping) for x in lines):
            raise ValueError("lines of a cost table must be a list of objects")
        return cls(lines=tuple(map(CostLine.from_dict, lines)))

    def _plain(self, context: int, batch: int) -> CostReading:
        return self._at(lambda line: line.plain, context, batch)

    def _verify(self, num_rows: int, context: int, batch: int) -> CostReading:
        if num_rows < 1:
            raise ValueError(f"num_rows is {num_rows}; a pass has at least 1 row")
        return self._in_cycle(lambda line: line.verify(num_rows), context, batch)

    def _overhead(self, num_speculative_tokens: int, context: int, batch: int) -> CostReading:
        if num_speculative_tokens < 1:
            raise ValueError(
                f"K is {num_speculative_tokens}; a speculative cycle drafts at least 1"
            )
        return self._in_cycle(lambda line: line.overhead(num_speculative_tokens), context, batch)

    def _in_cycle(self, pick: Pick, context: int, batch: int) -> CostReading:
        measured_batch = min(batch, self.batches[-1])
        return self._at(pick, context, measured_batch).times(batch / measured_batch)

    def _at(self, pick: Pick, context: int, batch: int) -> CostReading:
        """Interpolate between lines: linearly in context, then in batch."""
        if batch < 1:
            raise ValueError(f"batch is {batch}; it must be at least 1")
        contexts, batches = self.contexts, self.batches
        picked = {(line.batch, line.context): pick(line) for line in self.lines}
        at_context = [
            interpolate(contexts, [picked[b, c] for c in contexts], context) for b in batches
        ]
        return interpolate(batches, at_context, batch)


def _ratio(spent: CostReading, plain: CostReading) -> Interval:
    estimate = spent.s / plain.s
    reach = math.hypot(spent.error_s, estimate * plain.error_s) / plain.s
    return Interval(estimate=estimate, low=max(0.0, estimate - reach), high=estimate + reach)
