"""Random histories of a KV store against plain lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.tabular import TokenStore
from torch import Tensor

from forerun.errors import NotEnoughMemory
from forerun.models.kv_store import (
    MIN_SHARED_TOKENS,
    BlockedKVStore,
    ContiguousKVStore,
    KVPrefix,
    KVStore,
    Prefix,
)
from forerun.models.memory import BLOCK_ROWS, KVGeometry

NUM_SLOTS = 3
CAPACITY = 20
MAX_STAGED_ROWS = 4
NUM_BEGINNING = 24


class Subject(Protocol):
    """A store whose rows each hold one number, here to be written and read."""

    store: KVStore

    def write(self, slot: int, start: int, values: list[int]) -> None: ...

    def read(self, slot: int, end: int) -> list[int]: ...


def geometry_for(capacity: int, dtype: torch.dtype) -> KVGeometry:
    return KVGeometry(
        num_layers=2,
        num_kv_heads=2,
        head_dim=3,
        num_slots=NUM_SLOTS,
        capacity=capacity,
        max_staged_rows=MAX_STAGED_ROWS,
        dtype=dtype,
    )


class Contiguous:
    """Every layer, head and channel holds the row's number plus its own offset."""

    def __init__(self, capacity: int) -> None:
        self.store = ContiguousKVStore(geometry_for(capacity, torch.float64), torch.device("cpu"))
        self.offsets = torch.arange(24, dtype=torch.float64).view(4, 1, 2, 1, 3) / 32

    def write(self, slot: int, start: int, values: list[int]) -> None:
        rows = torch.tensor(values, dtype=torch.float64).view(1, 1, 1, -1, 1)
        views = self.store.stage(slot, start, len(values))
        for view, numbers in zip(views, rows + self.offsets, strict=True):
            view.copy_(numbers)

    def read(self, slot: int, end: int) -> list[int]:
        held = torch.stack(self.store.window(slot, 0, end)) - self.offsets
        values = held[0, 0, 0, :, 0]
        assert torch.equal(held, values.view(1, 1, 1, -1, 1).expand(held.shape))
        return [int(value) for value in values]


class Blocked:
    """The same in the layout of the C++ kernels, written and read one element at a time."""

    def __init__(self, capacity: int) -> None:
        self.store = BlockedKVStore(geometry_for(capacity, torch.float32), torch.device("cpu"))

    def places(self, slot: int, row: int) -> list[tuple[Tensor, int]]:
        """Every element of a row: its head of its plane, flat, and its place there."""
        block, lane = divmod(row, BLOCK_ROWS)
        found = []
        for plane, heads in enumerate(self.store.data[:, slot]):
            for head in heads:
                for i in range(3):
                    key = (3 * block + i) * BLOCK_ROWS + lane
                    found.append((head.view(-1), 3 * row + i if plane % 2 else key))
        return found

    def write(self, slot: int, start: int, values: list[int]) -> None:
        self.store.claim(slot, start, len(values))
        for row, value in enumerate(values, start):
            for offset, (head, place) in enumerate(self.places(slot, row)):
                head[place] = value + offset / 32

    def read(self, slot: int, end: int) -> list[int]:
        rows = []
        for row in range(end):
            held = [head[at] - i / 32 for i, (head, at) in enumerate(self.places(slot, row))]
            assert len({value.item() for value in held}) == 1
            rows.append(int(held[0]))
        return rows


class Tokens:
    def __init__(self, capacity: int) -> None:
        self.store = TokenStore(NUM_SLOTS, capacity, MAX_STAGED_ROWS)

    def write(self, slot: int, start: int, values: list[int]) -> None:
        self.store.stage(slot, start, values)

    def read(self, slot: int, end: int) -> list[int]:
        return self.store.tokens(slot, end)


@dataclass
class Naive:
    """What a slot holds."""

    committed: list[int] = field(default_factory=list)
    staged: list[int] = field(default_factory=list)


class History(RuleBasedStateMachine):
    """Interleaved sequences coming, growing, branching and going."""

    make: Callable[[int], Subject]

    def __init__(self) -> None:
        super().__init__()
        self.subject = self.make(CAPACITY)
        self.store = self.subject.store
        self.slots: dict[int, Naive] = {}
        self.prefixes: list[tuple[KVPrefix, list[int]]] = []
        self.num_values = 0

    def pick(self, data: st.DataObject) -> tuple[int, Naive]:
        slot = data.draw(st.sampled_from(sorted(self.slots)), label="slot")
        return slot, self.slots[slot]

    @precondition(lambda self: len(self.slots) < NUM_SLOTS)
    @rule()
    def reserve(self) -> None:
        slot = self.store.reserve()
        assert slot not in self.slots
        self.slots[slot] = Naive()

    @precondition(lambda self: len(self.slots) == NUM_SLOTS)
    @rule()
    def reserve_when_full(self) -> None:
        with pytest.raises(NotEnoughMemory, match="3 slots"):
            self.store.reserve()

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), num_rows=st.integers(1, 9))
    def stage(self, data: st.DataObject, num_rows: int) -> None:
        slot, naive = self.pick(data)
        kept = data.draw(st.integers(0, len(naive.staged)), label="staged rows kept")
        start = len(naive.committed) + kept
        values = list(range(self.num_values, self.num_values + num_rows))
        if start + num_rows > CAPACITY + MAX_STAGED_ROWS:
            with pytest.raises(NotEnoughMemory, match=f"slot {slot} would hold"):
                self.subject.write(slot, start, values)
            return
        self.subject.write(slot, start, values)
        self.num_values += num_rows
        naive.staged[kept:] = values

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), as_prefix=st.booleans())
    def commit(self, data: st.DataObject, as_prefix: bool) -> None:
        slot, naive = self.pick(data)
        size = len(naive.staged)
        if as_prefix:
            rows = range(data.draw(st.integers(0, size), label="rows"))
        else:
            rows = sorted(data.draw(st.sets(st.sampled_from(range(size))) if size else st.just([])))
        if len(naive.committed) + len(rows) > CAPACITY:
            with pytest.raises(NotEnoughMemory, match="capacity is 20"):
                self.store.commit(slot, rows)
            return
        self.store.commit(slot, rows)
        naive.committed += [naive.staged[row] for row in rows]
        naive.staged = []

    @precondition(lambda self: 0 < len(self.slots) < NUM_SLOTS)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        slot, naive = self.pick(data)
        copy = self.store.fork(slot)
        assert copy not in self.slots
        self.slots[copy] = Naive(committed=list(naive.committed))

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def export_prefix(self, data: st.DataObject) -> None:
        slot, naive = self.pick(data)
        size = data.draw(st.integers(0, len(naive.committed)), label="tokens")
        prefix = self.store.export_prefix(slot, size)
        self.prefixes.append((prefix, naive.committed[:size]))

    @precondition(lambda self: self.prefixes and len(self.slots) < NUM_SLOTS)
    @rule(data=st.data())
    def import_prefix(self, data: st.DataObject) -> None:
        prefix, values = data.draw(st.sampled_from(self.prefixes), label="prefix")
        slot = self.store.reserve()
        self.store.import_prefix(slot, prefix)
        self.slots[slot] = Naive(committed=list(values))

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot, _ = self.pick(data)
        self.store.free(slot)
        del self.slots[slot]

    @invariant()
    def holds_what_the_lists_hold(self) -> None:
        assert self.store.num_free == NUM_SLOTS - len(self.slots)
        for slot, naive in self.slots.items():
            assert self.store.length(slot) == len(naive.committed)
            expected = naive.committed + naive.staged
            assert self.subject.read(slot, len(expected)) == expected


class Beginnings(RuleBasedStateMachine):
    """Sequences out of few beginnings and two scopes: one that begins with what another has
    stored finds its own tokens, and no slot that is still needed is taken."""

    make: Callable[[int], Subject]

    def __init__(self) -> None:
        super().__init__()
        self.subject = self.make(NUM_BEGINNING + 4)
        self.store = self.subject.store
        self.live: dict[int, tuple[list[int], str]] = {}

    @precondition(lambda self: len(self.live) < NUM_SLOTS)
    @rule(
        beginning=st.integers(0, 2),
        part=st.integers(1, NUM_BEGINNING),
        rest=st.lists(st.integers(0, 1), max_size=4),
        scope=st.sampled_from("ab"),
    )
    def begin(self, beginning: int, part: int, rest: list[int], scope: str) -> None:
        ids = [*([beginning] * part), *rest]
        most = max((self.shared(ids, scope, slot) for slot in self.live), default=0)
        slot = self.store.begin(Prefix(ids=ids, scope=scope))
        assert slot not in self.live
        length = self.store.length(slot)
        assert length < len(ids)
        assert length >= (most if most >= MIN_SHARED_TOKENS else 0)
        assert length == 0 or length >= MIN_SHARED_TOKENS
        self.live[slot] = (ids, scope)

    def shared(self, ids: list[int], scope: str, slot: int) -> int:
        """Tokens a live slot has for a new sequence."""
        others, its_scope = self.live[slot]
        if scope != its_scope:
            return 0
        same = (a == b for a, b in zip(ids[:-1], others[: self.store.length(slot)], strict=False))
        return sum(takewhile(bool, same))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), is_kept=st.booleans(), num_fed=st.integers(0, 40))
    def grow(self, data: st.DataObject, is_kept: bool, num_fed: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.live)), label="slot")
        ids, _ = self.live[slot]
        start = self.store.length(slot)
        values = ids[start : start + num_fed]
        if values:
            self.subject.write(slot, start, values)
            self.store.commit(slot, range(len(values)) if is_kept else ())

    @precondition(lambda self: self.live)
    @rule(data=st.data(), share=st.sampled_from([0, 1, 2]))
    def end(self, data: st.DataObject, share: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.live)), label="slot")
        self.store.keep(slot, self.store.length(slot) * share // 2)
        del self.live[slot]

    @invariant()
    def every_sequence_finds_its_own_tokens(self) -> None:
        assert self.store.num_free == NUM_SLOTS - len(self.live)
        for slot, (ids, _) in self.live.items():
            length = self.store.length(slot)
            assert length == 0 or self.subject.read(slot, length) == ids[:length]


class ContiguousHistory(History):
    make = Contiguous


class BlockedHistory(History):
    make = Blocked


class TokenHistory(History):
    make = Tokens


HISTORIES = settings(max_examples=40, stateful_step_count=30)


class ContiguousBeginnings(Beginnings):
    make = Contiguous


class BlockedBeginnings(Beginnings):
    make = Blocked


class TokenBeginnings(Beginnings):
    make = Tokens


TestContiguousBeginnings = ContiguousBeginnings.TestCase
TestContiguousBeginnings.settings = HISTORIES
TestBlockedBeginnings = BlockedBeginnings.TestCase
TestBlockedBeginnings.settings = HISTORIES
TestBlockedKVStore = BlockedHistory.TestCase
TestBlockedKVStore.settings = HISTORIES
TestTokenBeginnings = TokenBeginnings.TestCase
TestTokenBeginnings.settings = HISTORIES
TestContiguousKVStore = ContiguousHistory.TestCase
TestContiguousKVStore.settings = HISTORIES
TestTokenStore = TokenHistory.TestCase
TestTokenStore.settings = HISTORIES
