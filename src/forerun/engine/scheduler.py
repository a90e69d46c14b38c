"""Continuous batching: who runs, and how many rows each sequence gets in a pass.

First come, first served. A prefill never starves decoding: every running sequence gets its decode
rows first, prompt chunks share what is left of the pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from forerun.engine.config import EngineConfig
from forerun.engine.sequence import Sequence, Status

__all__ = ["Scheduler", "Share"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The chain rows one sequence feeds in this pass.

    Attributes:
        sequence: whose rows.
        num_chain: pending tokens fed.
        completes: whether nothing stays pending, so that the pass yields a token.
    """

    sequence: Sequence
    num_chain: int
    completes: bool


class Scheduler:
    """Waiting and running sequences; owns no model state."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_unfinished(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def admit(self, num_free_slots: int) -> list[Sequence]:
        """Move waiting sequences into the batch while there is room; returns those moved."""
        room = min(num_free_slots, self.config.max_batch - len(self.running))
        admitted = [self.waiting.popleft() for _ in range(min(room, len(self.waiting)))]
        for sequence in admitted:
            sequence.status = Status.RUNNING
        self.running += admitted
        return admitted

    def remove(self, sequence: Sequence) -> None:
        """Take an aborted sequence out, wherever it is."""
        sequence.status = Status.FINISHED
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)

    def drop_finished(self) -> list[Sequence]:
        """Take finished sequences out of the batch."""
        finished = [s for s in self.running if s.status is Status.FINISHED]
        self.running = [s for s in self.running if s.status is not Status.FINISHED]
        return finished

    def shares(self, num_tree_rows: Seq[int]) -> list[Share]:
        """Chain rows of every running sequence in this pass.

        Args:
            num_tree_rows: draft rows of each running sequence, already within the budget.
        """
        budget = self.config.max_step_rows - sum(num_tree_rows)
        decoding = [s for s in self.running if pending(s) == 1]
        budget -= len(decoding)
        shares = []
        for sequence in self.running:
            num_pending = pending(sequence)
            if num_pending == 1:
                shares.append(Share(sequence=sequence, num_chain=1, completes=True))
                continue
            size = min(num_pending, self.config.prefill_chunk, budget)
            if size > 0:
                budget -= size
                completes = size == num_pending
                shares.append(Share(sequence=sequence, num_chain=size, completes=completes))
        return shares


def pending(sequence: Sequence) -> int:
    """Tokens of a running sequence that the target has not seen."""
    assert sequence.context is not None
    return sequence.context.num_pending
