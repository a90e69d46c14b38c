"""KV of a fixed number of sequences: reserved slots, committed and staged rows, shared prefixes.

Keys and values of a token are a function of the tokens up to it, at the same positions. So where
two sequences begin with the same tokens, what one has stored can be used by the other, exactly.

A drafter that reads features must have them for every committed token, those found in a shared
prefix included. So a store holds them by the same rows as the KV: they are staged after a pass,
move with a commit and are copied with a prefix, and a commit without them is an error.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.errors import NotEnoughMemory
from forerun.models.feature_rows import FeatureRows
from forerun.models.memory import BLOCK_ROWS, KVGeometry, count_bytes

MIN_SHARED_TOKENS = 16
"""A shorter match is not worth a copy: the rows it saves are nearly free in the pass."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefix:
    """Tokens of a sequence from its beginning, and the scope within which they may be shared."""

    ids: list[int]
    scope: str


def count_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common from the beginning."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVPrefix:
    """A copy of a committed prefix, which only stores of the same class can import."""

    num_tokens: int
    tensors: tuple[Tensor, ...]


class KVStore(ABC):
    """Per-sequence state of a model; subclasses store the rows, in a layout of their own.

    A slot holds committed tokens followed by staged rows, which are there until the next commit.
    Rows are staged without gaps and never over committed ones, so whatever a model reads has been
    written.

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
        self._features: FeatureRows | None = None

    @property
    def num_free(self) -> int:
        """Number of slots that are not reserved."""
        return len(self._free) + len(self._kept)

    @property
    def shares_parts(self) -> bool:
        """Whether a sequence may begin with a part of what a slot holds."""
        return self.snapshot_lengths is None

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
        """Free `slot` and discard its contents."""
        self._release(slot)
        self._free.append(slot)

    def _release(self, slot: int) -> None:
        self.length(slot)
        del self._committed[slot], self._written[slot]
        self._shared.pop(slot, None)

    def length(self, slot: int) -> int:
        """Number of committed tokens in `slot`."""
        committed = self._committed.get(slot)
        if committed is None:
            raise ValueError(f"slot {slot} is not reserved")
        return committed

    def claim(self, slot: int, start: int, num_rows: int, *, writes_features: bool = False) -> None:
        """Stage rows whose contents the caller writes; later rows become invalid.

        Args:
            writes_features: the caller writes `feature_rows`, too.

        Raises:
            ValueError: the rows overlap committed ones or leave a gap.
            NotEnoughMemory: they do not fit into the slot.
        """
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
        if self._features is not None:
            self._features.invalidate(slot, start)
            if writes_features:
                self._features.note_stored(slot, start, end, end)

    @abstractmethod
    def commit(self, slot: int, rows: Sequence[int]) -> None:
        """Commit the staged rows listed in `rows` and drop the other staged rows.

        They are ascending offsets from the committed length.

        Raises:
            ValueError: the rows are not ascending or were never staged.
            NotEnoughMemory: the slot would exceed its capacity.
        """

    def _commit(self, slot: int, rows: Sequence[int]) -> int:
        """Commit staged rows and their features; return the committed length before this call."""
        committed = self.length(slot)
        if self._features is not None:
            self._features.check_commit(slot, committed, rows)
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
        if self._features is not None:
            self._features.commit(slot, committed, rows)
        return committed

    def begin(self, wanted: Prefix) -> int:
        """Reserve a slot that already contains the longest stored prefix of `wanted`.

        The last token is never among them. Until it is given back, others find in this slot what it
        has committed. A kept slot is cut to the common prefix and reused, unless a copy into
        another slot discards fewer tokens. Raises NotEnoughMemory when no slot is left.
        """
        source, num_tokens = self._find_longest(wanted)
        if source is None:
            slot = self.reserve()
        elif num_tokens >= self._count_to_take_over(source):
            slot = source
            del self._kept[slot]
            self._committed[slot] = self._written[slot] = num_tokens
        else:
            if source in self._kept:
                self._kept[source] = self._kept.pop(source)  # used last, taken last
            slot = self.fork(source, num_tokens)
        self._shared[slot] = wanted
        if self._features is not None:
            self._features.invalidate(slot, self._committed[slot])
        return slot

    def _find_longest(self, wanted: Prefix) -> tuple[int | None, int]:
        """Return the slot that shares the most tokens with a new sequence, and how many.

        The last token of a sequence is always fed, because its logits are needed.
        """
        best, most = None, MIN_SHARED_TOKENS - 1
        for slot, prefix in (*self._kept.items(), *self._shared.items()):
            held = self._committed.get(slot, len(prefix.ids))
            usable = min(held, len(wanted.ids) - 1)
            if prefix.scope != wanted.scope or usable <= most:
                continue
            length = min(usable, count_common(prefix.ids, wanted.ids))
            if self.snapshot_lengths is not None and length < held:
                snapshot = self.snapshot_lengths.get(slot, 0)
                length = snapshot if snapshot <= length else 0
            if length > most:
                best, most = slot, length
        return best, most

    def most_common(self, wanted: Prefix) -> int:
        """Return how many tokens `wanted` has in common with the most similar text of any slot."""
        texts = (*self._kept.values(), *self._shared.values())
        given = (count_common(text.ids, wanted.ids) for text in texts if text.scope == wanted.scope)
        return max(given, default=0)

    def _count_to_take_over(self, slot: int) -> float:
        """Return how many tokens must match for `slot` to be reused; infinite if it is reserved."""
        kept = self._kept.get(slot)
        if kept is None:
            return math.inf
        oldest = next(iter(self._kept.values()))
        num_lost_by_copy = 0 if self._free else len(oldest.ids)
        return len(kept.ids) - num_lost_by_copy

    def keep(self, slot: int, num_tokens: int) -> None:
        """Free `slot`, but store its first tokens for `begin` until the memory is needed."""
        self.check_prefix(slot, num_tokens)
        shared = self._shared.get(slot)
        if shared is None or num_tokens == 0:
            self.free(slot)
            return
        self._release(slot)
        self._kept[slot] = Prefix(ids=shared.ids[:num_tokens], scope=shared.scope)

    def cut(self, slot: int, num_tokens: int) -> None:
        """Drop all tokens and staged rows of `slot` after its first `num_tokens` tokens."""
        self.check_prefix(slot, num_tokens)
        self._committed[slot] = self._written[slot] = num_tokens
        if self._features is not None:
            self._features.invalidate(slot, num_tokens)

    def count_held(self, slot: int) -> int:
        """Number of tokens that a reserved or kept slot holds."""
        kept = self._kept.get(slot)
        return self.length(slot) if kept is None else len(kept.ids)

    def check_prefix(self, slot: int, num_tokens: int) -> None:
        """Refuse a prefix with more tokens than a reserved or kept slot holds."""
        held = self.count_held(slot)
        if not 0 <= num_tokens <= held:
            raise ValueError(f"a prefix of {num_tokens} tokens of slot {slot}, which holds {held}")

    @abstractmethod
    def fork(self, slot: int, num_tokens: int | None = None) -> int:
        """Copy the first `num_tokens` (None: all) committed tokens of `slot` into a new slot."""

    @abstractmethod
    def export_prefix(self, slot: int, num_tokens: int) -> KVPrefix:
        """Return a copy of the KV of the first `num_tokens` committed tokens."""

    @abstractmethod
    def import_prefix(self, slot: int, prefix: KVPrefix) -> None:
        """Fill an empty slot with an exported prefix."""

    def _export(self, slot: int, num_tokens: int, content: Tensor) -> KVPrefix:
        """Return a prefix with this content and the features of its tokens."""
        if self._features is None:
            return KVPrefix(num_tokens=num_tokens, tensors=(content,))
        features = self._features.read(slot, 0, num_tokens)
        return KVPrefix(num_tokens=num_tokens, tensors=(content, features))

    def _fill(self, slot: int, num_tokens: int) -> None:
        """Give an empty slot `num_tokens` committed tokens at once, without their features."""
        if self.length(slot) or self._written[slot]:
            raise ValueError(f"slot {slot} holds {self._written[slot]} rows; it must be empty")
        self.claim(slot, 0, num_tokens)
        if num_tokens > self.capacity:
            raise NotEnoughMemory(
                f"slot {slot} would hold {num_tokens} tokens, its capacity is {self.capacity}; "
                "raise max_context"
            )
        self._committed[slot] = num_tokens

    def _import(self, slot: int, prefix: KVPrefix) -> Tensor:
        """Commit the tokens and features of a prefix in an empty slot; return its content."""
        if self._features is not None and len(prefix.tensors) < 2:
            raise ValueError("the prefix was exported without features, which this store keeps")
        self._fill(slot, prefix.num_tokens)
        if self._features is not None:
            self._features.stage(slot, 0, prefix.num_tokens, prefix.tensors[1])
        return prefix.tensors[0]

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers whose features the store holds; see `keep_features`."""
        return () if self._features is None else self._features.layers

    @property
    def feature_rows(self) -> Float[Tensor, "slots rows layers width"] | None:
        """The features themselves, which may be written in place; None where none are kept."""
        return None if self._features is None else self._features.rows

    @abstractmethod
    def keep_features(self, layers: tuple[int, ...]) -> None:
        """Store features of these layers with the KV from now on; an empty sequence ends this.

        From then on every commit needs the features of its rows. Kept prefixes of earlier sequences
        are forgotten. No slot may be reserved.

        Raises:
            NotEnoughMemory: there is no room for them.
        """

    def stage_features(
        self, slot: int, start: int, features: Float[Tensor, "rows layers width"]
    ) -> None:
        """Store the features that a pass returned for the staged rows from `start` on."""
        self.length(slot)
        self._get_features().stage(slot, start, self._written[slot], features)

    def features(self, slot: int, start: int, stop: int) -> Float[Tensor, "rows layers width"]:
        """A copy of the features of committed rows [start, stop)."""
        self.check_prefix(slot, stop)
        return self._get_features().read(slot, start, stop)

    def _get_features(self) -> FeatureRows:
        if self._features is None:
            raise ValueError("this store keeps no features; call keep_features(layers) first")
        return self._features

    def _renew_features(
        self, layers: tuple[int, ...], width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Discard stored prefixes, and store features of these layers from now on."""
        if self._committed:
            raise ValueError(f"slots {sorted(self._committed)} are reserved; free them first")
        self._free += self._kept
        self._kept.clear()
        self._features = None
        if layers:
            shape = (self.num_slots, self.capacity + self.max_staged_rows, width)
            self._features = FeatureRows(layers, shape, dtype, device)


def _is_ascending(rows: Sequence[int]) -> bool:
    """Whether `rows` is strictly ascending from 0 or more; constant time for a plain range."""
    if rows[0] < 0:
        return False
    if isinstance(rows, range):
        return rows.step > 0
    return all(before < after for before, after in pairwise(rows))


def count_in_place(rows: Sequence[int]) -> int:
    if not rows or rows[-1] == len(rows) - 1:
        return len(rows)
    return next(index for index, row in enumerate(rows) if row != index)


HUGE_PAGE_BYTES = 2 << 20


def zeros(geometry: KVGeometry, device: torch.device) -> torch.Tensor:
    """Allocate the store's tensor, on Linux in huge pages because passes read it sequentially."""
    num_bytes = count_bytes(geometry)
    if device.type != "cpu" or num_bytes < HUGE_PAGE_BYTES or sys.platform != "linux":
        return torch.zeros(geometry.shape, dtype=geometry.dtype, device=device)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them: everything works, slower
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=geometry.dtype).view(geometry.shape)


class TensorKVStore(KVStore):
    """A KVStore in one tensor, so that one call commits or copies rows for all layers.

    Attributes:
        data: keys of layer l at 2l, values at 2l + 1, each [slots, kv_heads, width, head_dim].
    """

    def __init__(self, geometry: KVGeometry, device: torch.device) -> None:
        super().__init__(geometry.num_slots, geometry.capacity, geometry.max_staged_rows)
        self.geometry = geometry
        self.data = zeros(geometry, device)

    @property
    def device(self) -> torch.device:
        return self.data.device

    @abstractmethod
    def _take(self, slot: int, rows: Tensor) -> Tensor:
        """Return a copy of rows of a slot, [2 * layers, kv_heads, rows, head_dim]."""

    @abstractmethod
    def _put(self, slot: int, rows: Tensor, content: Tensor) -> None:
        """Write rows of a slot, given as `_take` returns them."""

    def _list_places(self, rows: Iterable[int]) -> Tensor:
        return torch.tensor([*rows], dtype=torch.int64, device=self.device)

    def commit(self, slot: int, rows: Sequence[int]) -> None:
        """Commit staged rows; no data move when they are a prefix of what is staged."""
        start = self._commit(slot, rows)
        num_placed = count_in_place(rows)
        if num_placed == len(rows):
            return
        kept = self._take(slot, self._list_places(start + row for row in rows[num_placed:]))
        self._put(slot, self._list_places(range(start + num_placed, start + len(rows))), kept)

    def fork(self, slot: int, num_tokens: int | None = None) -> int:
        length = self.length(slot) if num_tokens is None else num_tokens
        self.check_prefix(slot, length)
        copy = self.reserve()
        self._fill(copy, length)
        if self._features is not None:
            self._features.copy(slot, copy, length)
        num_rows = -(-length // BLOCK_ROWS) * BLOCK_ROWS
        self.data[:, copy, :, :num_rows] = self.data[:, slot, :, :num_rows]
        return copy

    def export_prefix(self, slot: int, num_tokens: int) -> KVPrefix:
        self.check_prefix(slot, num_tokens)
        content = self._take(slot, self._list_places(range(num_tokens)))
        return self._export(slot, num_tokens, content)

    def import_prefix(self, slot: int, prefix: KVPrefix) -> None:
        content = self._import(slot, prefix)
        self._put(slot, self._list_places(range(prefix.num_tokens)), content)

    def keep_features(self, layers: tuple[int, ...]) -> None:
        geometry = self.geometry
        if layers and not geometry.hidden_size:
            raise ValueError("a store without hidden_size in its geometry cannot keep features")
        self._renew_features(layers, geometry.hidden_size, geometry.dtype, self.device)


class ContiguousKVStore(TensorKVStore):
    """A KV store whose rows lie one after another, which torch reads as views."""

    def stage(self, slot: int, start: int, num_rows: int) -> tuple[torch.Tensor, ...]:
        """Stage rows and return views to write their keys and values to.

        The views are [1, kv_heads, num_rows, head_dim]: keys of layer l at 2l, values at 2l + 1.

        Raises:
            NotEnoughMemory: the rows do not fit into the slot.
        """
        self.claim(slot, start, num_rows)
        return self.window(slot, start, start + num_rows)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, [slots, kv_heads, width, head_dim] each, as views."""
        return self.data[2 * index], self.data[2 * index + 1]

    def window(self, slot: int, start: int, end: int) -> tuple[torch.Tensor, ...]:
        """Rows [start, end) of a slot in every layer, as views laid out like those of `stage`."""
        return self.data[:, slot : slot + 1, :, start:end].unbind(0)

    def _take(self, slot: int, rows: Tensor) -> Tensor:
        return self.data[:, slot].index_select(2, rows)

    def _put(self, slot: int, rows: Tensor, content: Tensor) -> None:
        self.data[:, slot].index_copy_(2, rows, content)


class BlockedKVStore(TensorKVStore):
    """The KV store of the C++ kernels, which keeps keys in the order in which they are multiplied.

    Values lie row after row. The keys of every 16 rows share a block: the first four bytes of each,
    then the next four.
    """

    def _take(self, slot: int, rows: Tensor) -> Tensor:
        keys = self._find_keys(slot)[:, :, rows // BLOCK_ROWS, rows % BLOCK_ROWS].flatten(-2)
        return torch.stack((keys, self.data[1::2, slot][:, :, rows]), 1).flatten(0, 1)

    def _put(self, slot: int, rows: Tensor, content: Tensor) -> None:
        keys = self._find_keys(slot)
        given = content[0::2].reshape(*content[0::2].shape[:3], *keys.shape[-2:])
        keys[:, :, rows // BLOCK_ROWS, rows % BLOCK_ROWS] = given
        self.data[1::2, slot].index_copy_(2, rows, content[1::2])

    def _find_keys(self, slot: int) -> Tensor:
        """Keys of a slot, [layers, kv_heads, blocks, rows of a block, words, values of a word]."""
        keys = self.data[0::2, slot]
        num_layers, num_heads, width, head_dim = keys.shape
        depth = 4 // keys.itemsize
        shape = (width // BLOCK_ROWS, head_dim // depth, BLOCK_ROWS, depth)
        return keys.view(num_layers, num_heads, *shape).transpose(3, 4)
