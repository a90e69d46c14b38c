"""Continuous batching: who runs, and how many rows each sequence gets in a pass.

First come, first served. A prefill never starves decoding: every running sequence gets its decode
rows first, prompt chunks share what is left of the pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from forerun.engine.config import EngineConfig
from forerun.engine.sequence import Sequence
from forerun.engine.turn import Turn

__all__ = ["Scheduler"]


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
        self.running += admitted
        return admitted

    def remove(self, sequence: Sequence) -> None:
        """Take an aborted sequence out, wherever it is."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)

    def drop_finished(self) -> list[Sequence]:
        """Take stopped sequences out of the batch."""
        finished = [s for s in self.running if s.stop is not None]
        if finished:
            self.running = [s for s in self.running if s.stop is None]
        return finished

    def share(self, turns: Seq[Turn]) -> None:
        """Say how many pending tokens every running sequence feeds in this pass.

        Args:
            turns: of all running sequences, with proposals already within the budget.
        """
        budget = self.config.max_step_rows
        for turn in turns:
            if turn.decodes:
                turn.num_chain = 1
                budget -= turn.num_rows
        for turn in turns:
            if not turn.decodes:
                turn.num_chain = max(0, min(turn.num_pending, self.config.prefill_chunk, budget))
                budget -= turn.num_chain
