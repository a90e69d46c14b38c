"""Continuous batching: which sequences run, and how many rows each gets in a pass.

By priority, then first come, first served. A prefill never starves decoding: every running sequence
gets its decode rows first, prompt chunks share what is left of the pass.

A sequence that has to give up its place loses its KV and nothing else. It waits where it would have
waited, and its tokens are read again later, as a longer prompt. Its text is not affected: noise is
keyed by position or by the committed length at the start of a step, a step is taken as a whole or
not at all, so no number is drawn twice and none is skipped.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from forerun.engine.config import EngineConfig
from forerun.engine.scheduled import ScheduledSequence
from forerun.engine.sequence import Sequence
from forerun.models.slots import MIN_SHARED_TOKENS, common_length

__all__ = ["Scheduler"]

MAX_LOOKED_AT = 32
"""Waiting sequences that are compared with the running ones at most, before each step."""


class Scheduler:
    """The waiting and the running sequences; it holds no state of a model.

    Attributes:
        waiting: those without a place, the next one first.
        running: those with a place, in the order they got it.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    @property
    def has_unfinished(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def num_unfinished(self) -> int:
        """Sequences that wait or run."""
        return len(self.waiting) + len(self.running)

    @property
    def is_settled(self) -> bool:
        """Whether no sequence can be admitted or preempted before the next step."""
        return not self.waiting and self.config.max_kv_tokens is None

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence into the queue by its rank."""
        insort(self.waiting, sequence, key=rank)

    def preempt(self, num_free_slots: int) -> list[Sequence]:
        """Move sequences from the batch back to the queue; returns them, still with their context.

        The last in order gives way where the KV holds too many rows, and where a waiting sequence
        with a lower priority number would have no room otherwise. One sequence always stays.
        """
        victims: list[Sequence] = []
        while self.running:
            last = max(self.running, key=rank)
            num_free = num_free_slots + len(victims)
            if not (self._holds_too_much() or self._outranks(last, num_free)):
                break
            self.running.remove(last)
            victims.append(last)
        for victim in victims:
            victim.num_preemptions += 1
            self.add(victim)
        return victims

    def _holds_too_much(self) -> bool:
        most = self.config.max_kv_tokens
        return most is not None and len(self.running) > 1 and self._num_kv_tokens() > most

    def _outranks(self, last: Sequence, num_free_slots: int) -> bool:
        """Whether the next in the queue needs, and may take, the place of `last`."""
        if not self.waiting or self.waiting[0].rank[0] >= last.rank[0]:
            return False
        return not self._has_room(self.waiting[0], num_free_slots)

    def admit(self, num_free_slots: int) -> Iterator[Sequence]:
        """Move waiting sequences into the batch while there is room, one at a time.

        Give each its context before asking for the next: the next may begin with its tokens.
        """
        place = 0
        while place < min(len(self.waiting), MAX_LOOKED_AT):
            sequence = self.waiting[place]
            if not self._has_room(sequence, num_free_slots):
                return
            if self._is_being_read(sequence):
                place += 1  # the sequences behind it need not wait
                continue
            self.running.append(self.waiting.pop(place))
            num_free_slots -= 1
            yield sequence

    def _has_room(self, sequence: Sequence, num_free_slots: int) -> bool:
        if num_free_slots < 1 or len(self.running) >= self.config.max_batch:
            return False
        most = self.config.max_kv_tokens
        if most is None or not self.running:
            return True
        return self._num_kv_tokens() + self._kv_tokens(sequence) <= most

    def _kv_tokens(self, sequence: Sequence) -> int:
        """Rows a sequence may have in the KV at the end of the next pass."""
        return len(sequence.ids) + self.config.max_nodes

    def _num_kv_tokens(self) -> int:
        return sum(map(self._kv_tokens, self.running))

    def _is_being_read(self, sequence: Sequence) -> bool:
        """Whether a running sequence is reading a prefix that this one could then reuse."""
        return sequence.scope is not None and any(
            num_unread(reader, sequence) >= MIN_SHARED_TOKENS
            for reader in self.running
            if reader.scope == sequence.scope
        )

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue or from the batch."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)

    def drop_finished(self) -> list[Sequence]:
        """Remove the sequences that have stopped from the batch, and return them."""
        finished = [s for s in self.running if s.stop is not None]
        if finished:
            self.running = [s for s in self.running if s.stop is None]
        return finished

    def assign_rows(self, scheduled: Seq[ScheduledSequence]) -> list[ScheduledSequence]:
        """Decide how many pending tokens every running sequence feeds in this pass.

        Args:
            scheduled: all running sequences, with proposals already within the budget.

        Returns:
            Those that have rows in the pass.
        """
        budget = self.config.max_step_rows
        for entry in scheduled:
            if entry.decodes:
                entry.num_chain = 1
                budget -= entry.num_logit_rows
        if self.config.max_prefill_rows is not None:
            budget = min(budget, self.config.max_prefill_rows)
        for entry in scheduled:
            if not entry.decodes:
                entry.num_chain = max(0, min(entry.num_pending, self.config.prefill_chunk, budget))
                budget -= entry.num_chain
        return [entry for entry in scheduled if entry.num_chain]


def rank(sequence: Sequence) -> tuple[int, int]:
    """Sort key: priority, then order of arrival."""
    return sequence.rank


def num_unread(reader: Sequence, sequence: Sequence) -> int:
    """Number of tokens of the common prefix that `reader` has yet to feed after its next one."""
    if reader.context is None or reader.context.num_pending <= 1:
        return 0
    num_common = min(common_length(reader.ids, sequence.ids), len(sequence.ids) - 1)
    return num_common - reader.context.num_cached
