"""Bookkeeping of all KV stores: reserved slots, committed and staged rows, shared prefixes.

Keys and values of a token are a function of the tokens up to it, at the same positions. So where
two sequences begin with the same tokens, what one has stored can be used by the other, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from forerun.errors import NotEnoughMemory

MIN_SHARED_TOKENS = 16
"""A shorter match is not worth a copy: the rows it saves are nearly free in the pass."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefix:
    """Tokens of a sequence from its beginning, and the scope within which they may be shared."""

    ids: list[int]
    scope: str


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common from the beginning."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class SlotTable:
    """Slots of a KV store and the rows committed and staged in them, without tensors.

    A slot holds `committed` tokens followed by staged rows. Rows are staged without gaps and never
    over committed ones, so whatever a model reads has been written.

    A slot given back may be kept: its tokens stay for sequences that begin with them until nothing
    emptier is left to reserve. Kept slots count as free; the one kept longest ago goes first.

    Args:
        max_staged_rows: rows that may be staged past `capacity`; a token tree near the end of the
            context has more rows than it can commit.

    Attributes:
        snapshot_lengths: for recurrent models, the one length below that of a slot's text at which
            the text can be cut for another sequence, by slot; a slot without an entry is shared as
            a whole. None for other models, whose texts can be cut anywhere.
    """

    def __init__(self, num_slots: int, capacity: int, max_staged_rows: int) -> None:
        self.num_slots = num_slots
        self.capacity = capacity
        self.max_staged_rows = max_staged_rows
        self.snapshot_lengths: dict[int, int] | None = None
        self._committed: dict[int, int] = {}
        self._written: dict[int, int] = {}
        self._shared: dict[int, Prefix] = {}
        self._kept: dict[int, Prefix] = {}
        self._free = list(reversed(range(num_slots)))

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._kept)

    def reserve(self) -> int:
        """Take a free slot with committed length 0; raises NotEnoughMemory where none is free."""
        if self._free:
            slot = self._free.pop()
        elif self._kept:
            slot = next(iter(self._kept))
            del self._kept[slot]
        else:
            raise NotEnoughMemory(
                f"all {self.num_slots} slots of the KV store are taken; free one or raise max_batch"
            )
        self._committed[slot] = self._written[slot] = 0
        return slot

    def free(self, slot: int) -> None:
        self._release(slot)
        self._free.append(slot)

    def _release(self, slot: int) -> None:
        self.length(slot)
        del self._committed[slot], self._written[slot]
        self._shared.pop(slot, None)

    def begin(self, wanted: Prefix, fork: Callable[[int, int], int]) -> int:
        """Reserve a slot that already contains the longest stored prefix of `wanted`.

        A kept slot is cut to the common prefix and reused, unless a copy into another slot discards
        fewer tokens.

        Args:
            wanted: tokens of the new sequence.
            fork: copies a number of tokens from the beginning of a slot to a new slot, which it
                returns.

        Raises:
            NotEnoughMemory: every slot is reserved.
        """
        source, num_tokens = self._longest_match(wanted)
        if source is None:
            slot = self.reserve()
        elif num_tokens >= self._least_to_take_over(source):
            slot = source
            del self._kept[slot]
            self._committed[slot] = self._written[slot] = num_tokens
        else:
            if source in self._kept:
                self._kept[source] = self._kept.pop(source)  # used last, taken last
            slot = fork(source, num_tokens)
        self._shared[slot] = wanted
        return slot

    def _longest_match(self, wanted: Prefix) -> tuple[int | None, int]:
        """Return the slot that shares the most tokens with a new sequence, and how many.

        The last token of a sequence is always fed, because its logits are needed.
        """
        best, most = None, MIN_SHARED_TOKENS - 1
        for slot, prefix in (*self._kept.items(), *self._shared.items()):
            held = self._committed.get(slot, len(prefix.ids))
            usable = min(held, len(wanted.ids) - 1)
            if prefix.scope != wanted.scope or usable <= most:
                continue
            length = min(usable, common_length(prefix.ids, wanted.ids))
            if self.snapshot_lengths is not None and length < held:
                snapshot = self.snapshot_lengths.get(slot, 0)
                length = snapshot if snapshot <= length else 0
            if length > most:
                best, most = slot, length
        return best, most

    def most_common(self, wanted: Prefix) -> int:
        """Return how many tokens `wanted` has in common with the most similar text of any slot."""
        texts = (*self._kept.values(), *self._shared.values())
        given = (
            common_length(text.ids, wanted.ids) for text in texts if text.scope == wanted.scope
        )
        return max(given, default=0)

    def _least_to_take_over(self, slot: int) -> float:
        """Return how many tokens must match for `slot` to be reused; infinite if it is reserved."""
        kept = self._kept.get(slot)
        if kept is None:
            return math.inf
        oldest = next(iter(self._kept.values()))
        num_lost_by_copy = 0 if self._free else len(oldest.ids)
        return len(kept.ids) - num_lost_by_copy

    def keep(self, slot: int, num_tokens: int) -> None:
        """Free `slot` but keep its first `num_tokens` tokens for `begin`."""
        self.check_prefix(slot, num_tokens)
        shared = self._shared.get(slot)
        if shared is None or num_tokens == 0:
            self.free(slot)
            return
        self._release(slot)
        self._kept[slot] = Prefix(ids=shared.ids[:num_tokens], scope=shared.scope)

    def check_prefix(self, slot: int, num_tokens: int) -> None:
        """Refuse a prefix with more tokens than a reserved or kept slot holds."""
        kept = self._kept.get(slot)
        held = self.length(slot) if kept is None else len(kept.ids)
        if not 0 <= num_tokens <= held:
            raise ValueError(f"a prefix of {num_tokens} tokens of slot {slot}, which holds {held}")

    def check_snapshot(self, slot: int, num_tokens: int | None) -> None:
        """Refuse a part of a slot's text that has no recurrent state; None stands for all of it."""
        kept = self._kept.get(slot)
        held = self.length(slot) if kept is None else len(kept.ids)
        if num_tokens not in (None, held, (self.snapshot_lengths or {}).get(slot)):
            raise ValueError(
                f"a prefix of {num_tokens} tokens of slot {slot}, which holds {held} and whose "
                "recurrent states belong to all of them"
            )

    def length(self, slot: int) -> int:
        committed = self._committed.get(slot)
        if committed is None:
            raise ValueError(f"slot {slot} is not reserved")
        return committed

    def num_written(self, slot: int) -> int:
        """Number of committed and staged rows of a reserved slot."""
        self.length(slot)
        return self._written[slot]

    def forget_kept(self) -> None:
        if self._committed:
            raise ValueError(f"slots {sorted(self._committed)} are reserved; free them first")
        self._free += self._kept
        self._kept.clear()

    def stage(self, slot: int, start: int, num_rows: int) -> None:
        """Record that rows `start` to `start + num_rows` are written; later rows become invalid."""
        committed, written = self.length(slot), self._written[slot]
        if not committed <= start <= written:
            raise ValueError(
                f"rows of slot {slot} start at {start}; {committed} tokens are committed and "
                f"{written} rows written, so they must start between the two"
            )
        end, width = start + num_rows, self.capacity + self.max_staged_rows
        if end > width:
            raise NotEnoughMemory(
                f"slot {slot} would hold {end} rows; there is room for {self.capacity} tokens and "
                f"{self.max_staged_rows} staged rows: feed or draft less, or raise max_context"
            )
        self._written[slot] = end

    def commit(self, slot: int, rows: Sequence[int]) -> int:
        """Commit the staged rows listed in `rows` and drop the other staged rows.

        They are ascending offsets from the committed length, the old value of which is returned.
        """
        committed = self.length(slot)
        num_staged = self._written[slot] - committed
        if rows and not _is_ascending(rows):
            raise ValueError(f"rows {list(rows)} to commit are not ascending from 0")
        if rows and rows[-1] >= num_staged:
            raise ValueError(f"row {rows[-1]} of slot {slot} is not among its {num_staged} staged")
        length = committed + len(rows)
        if length > self.capacity:
            raise NotEnoughMemory(
                f"slot {slot} would commit {length} tokens, its capacity is {self.capacity}; "
                "raise max_context"
            )
        self._committed[slot] = self._written[slot] = length
        return committed

    def cut(self, slot: int, num_tokens: int) -> None:
        self.check_prefix(slot, num_tokens)
        self._committed[slot] = self._written[slot] = num_tokens

    def fill(self, slot: int, num_tokens: int) -> None:
        """Give an empty slot `num_tokens` committed tokens at once."""
        if self.length(slot) or self._written[slot]:
            raise ValueError(f"slot {slot} holds {self._written[slot]} rows; it must be empty")
        self.stage(slot, 0, num_tokens)
        self.commit(slot, range(num_tokens))


def _is_ascending(rows: Sequence[int]) -> bool:
    """Whether `rows` is strictly ascending from 0 or more; constant time for a plain range."""
    if rows[0] < 0:
        return False
    if isinstance(rows, range):
        return rows.step > 0
    return all(before < after for before, after in pairwise(rows))


def num_in_place(rows: Sequence[int]) -> int:
    if not rows or rows[-1] == len(rows) - 1:
        return len(rows)
    return next(index for index, row in enumerate(rows) if row != index)
