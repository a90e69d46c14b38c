"""The store of recurrent states at its breakpoints: which state is where after every operation.

A state here is the number of the row that it follows, counted from 1. So the state of a chain is
its length, and that of a tree node tells which node it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from forerun.models.base import Span
from forerun.models.kv_store import Prefix
from forerun.models.memory import KVGeometry
from forerun.models.recurrent import (
    PackedRecurrence,
    RecurrentPass,
    RecurrentStore,
    StackedStates,
    _schedule,
)
from forerun.theory.tree import TokenTree

GEOMETRY = KVGeometry(
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    num_slots=3,
    capacity=64,
    max_staged_rows=8,
    dtype=torch.float32,
    state_bytes=4,
)
KEY = ("recurrent", 0)
SYSTEM = [*range(100, 140)]
"""Beginning that texts share: 40 tokens, of which whole blocks of 16 count."""


@pytest.fixture
def store() -> RecurrentStore:
    return RecurrentStore(GEOMETRY, torch.device("cpu"))


def text(*own: int, num_shared: int = 40, scope: str = "s") -> Prefix:
    return Prefix(ids=[*SYSTEM[:num_shared], *own], scope=scope)


def stage(store: RecurrentStore, slot: int, num_rows: int, *, lacking: Iterable[int] = ()) -> None:
    """Stage rows with their states, except those after the rows in `lacking`."""
    start = store.length(slot)
    store.claim(slot, start, num_rows)
    for row in {*range(start, start + num_rows)} - {*lacking}:
        store.put_state(slot, row, 0, {KEY: torch.full((1, 1), row + 1.0)})


def read(store: RecurrentStore, slot: int, num_rows: int) -> None:
    stage(store, slot, num_rows)
    store.commit(slot, range(num_rows))


def state_of(store: RecurrentStore, slot: int) -> float | None:
    """Return the state that the next row of a slot starts from; None at the beginning of a text."""
    state = store.state_before(slot, store.length(slot), 0)
    return float(state[KEY]) if state else None


def second_text(store: RecurrentStore) -> int:
    """Read a text and a second one of the same beginning, which keeps a snapshot; its slot."""
    first = store.begin(text(1, 2))
    read(store, first, 42)
    store.free(first) if store.num_free == 0 else store.keep(first, 42)
    second = store.begin(text(3, 4, 5))
    assert (store.length(second), store.due) == (0, {second: 32})
    read(store, second, 43)
    return second


def test_a_commit_takes_the_state_of_the_last_accepted_row(store):
    slot = store.reserve()
    stage(store, slot, 5)
    store.commit(slot, [0, 2])
    assert (store.length(slot), state_of(store, slot)) == (2, 3.0)


def test_states_of_rejected_rows_are_gone(store):
    slot = store.reserve()
    stage(store, slot, 5)
    store.commit(slot, [0, 1])
    stage(store, slot, 2, lacking=[3])
    with pytest.raises(ValueError, match="row 1 of slot 0 has no recurrent state"):
        store.commit(slot, [0, 1])


def test_a_commit_of_nothing_keeps_the_state(store):
    slot = store.reserve()
    read(store, slot, 3)
    stage(store, slot, 2)
    store.commit(slot, [])
    assert (store.length(slot), state_of(store, slot)) == (3, 3.0)


@pytest.mark.parametrize("parts", [(43,), (32, 11), (31, 12), (31, 1, 11), (33, 10)])
def test_a_snapshot_is_the_state_after_the_shared_tokens(store, parts):
    store.keep(store.begin(text(1, 2)), 0)
    first = store.begin(text(1, 2))
    read(store, first, 42)
    second = store.begin(text(3, 4, 5))
    for num_rows in parts:
        read(store, second, num_rows)
    third = store.begin(text(6, 7))
    assert (store.length(third), state_of(store, third)) == (32, 32.0)
    assert state_of(store, second) == 43.0


def test_a_slot_that_is_taken_over_starts_from_its_snapshot(store):
    second = second_text(store)
    others = [store.reserve() for _ in range(store.num_free)]
    for slot in others:
        store.free(slot)
    store.keep(second, 43)
    taken = [store.begin(text(n, n)) for n in (6, 7, 8)]
    assert [store.length(slot) for slot in taken] == [32, 32, 32]
    assert [state_of(store, slot) for slot in taken] == [32.0, 32.0, 32.0]


def test_copies_of_a_snapshot_keep_it_and_do_not_write_to_each_other(store):
    second = second_text(store)
    copies = [store.begin(text(6)), store.fork(second, 32)]
    assert [state_of(store, slot) for slot in copies] == [32.0, 32.0]
    for slot in copies:
        read(store, slot, 1)
    assert [state_of(store, slot) for slot in (second, *copies)] == [43.0, 33.0, 33.0]
    store.cut(copies[0], 32)
    assert (store.length(copies[0]), state_of(store, copies[0])) == (32, 32.0)


def test_modules_write_into_copies_of_states():
    for num_texts in (1, 2):
        given = [{KEY: torch.full((1, 2), float(n))} for n in range(num_texts)]
        stacked = StackedStates(given)
        tensor = stacked.get_recurrent_state(0)
        assert tensor is not None
        tensor += 7
        assert [float(state[KEY][0, 0]) for state in given] == [*map(float, range(num_texts))]


def test_a_text_that_parts_before_the_snapshot_finds_nothing(store):
    second_text(store)
    slot = store.begin(text(9, 9, num_shared=20))
    assert (store.length(slot), state_of(store, slot)) == (0, None)


def test_a_text_is_kept_as_a_whole_or_not_at_all(store):
    for num_kept, num_found in ((42, 42), (41, 0)):
        slot = store.begin(text(1, 2, scope=str(num_kept)))
        read(store, slot, 42)
        store.keep(slot, num_kept)
        again = store.begin(text(1, 2, 3, scope=str(num_kept)))
        assert store.length(again) == num_found
        assert state_of(store, again) == (num_found or None)
        store.free(again)


def test_a_cut_goes_to_the_snapshot_or_to_the_beginning(store):
    second = second_text(store)
    copy = store.fork(second)
    store.cut(second, 32)
    assert (store.length(second), state_of(store, second)) == (32, 32.0)
    store.cut(copy, 40)
    assert (store.length(copy), state_of(store, copy)) == (0, None)


def test_a_cut_drops_the_states_of_staged_rows(store):
    slot = store.reserve()
    read(store, slot, 4)
    stage(store, slot, 2)
    store.cut(slot, 4)
    stage(store, slot, 1, lacking=[4])
    with pytest.raises(ValueError, match="row 0 of slot 0 has no"):
        store.commit(slot, [0])


def test_a_preempted_text_begins_without_a_state(store):
    slots = [store.reserve() for _ in range(3)]
    for slot in slots:
        read(store, slot, 20)
        stage(store, slot, 2)
        store.free(slot)
    assert [state_of(store, store.reserve()) for _ in range(3)] == [None] * 3


def test_a_text_without_a_match_begins_without_a_state(store):
    for n in range(4):
        slot = store.begin(text(scope=str(n)))
        assert state_of(store, slot) is None
        read(store, slot, 40)
        store.free(slot)


def test_a_snapshot_that_was_never_reached_is_not_awaited_by_the_next_text(store):
    first = store.begin(text(1, 2))
    read(store, first, 42)
    second = store.begin(text(3, 4, 5))
    read(store, second, 16)
    assert store.due == {second: 32}
    store.keep(second, 16)
    store.free(first)
    third = store.begin(text(8, num_shared=16))
    assert (third, store.length(third), store.due) == (second, 16, {})
    read(store, third, 1)
    assert state_of(store, third) == 17.0


def test_the_states_after_a_convolution_are_its_last_inputs():
    states = StackedStates([{}])
    seen = states.update_conv_state(torch.tensor([[[1.0]]]), 0, conv_kernel_size=3)
    assert seen.tolist() == [[[0, 0, 0, 1]]]
    seen = states.update_conv_state(torch.tensor([[[2.0, 3.0]]]), 0)
    assert seen.tolist() == [[[0, 0, 1, 2, 3]]]
    assert states.of(0)["conv", 0].tolist() == [[[1, 2, 3]]]


def test_a_chain_is_cut_where_a_snapshot_is_due():
    span = Span(slot=0, start=10, num_chain=40)
    runs = [row for batch in _schedule([span], {0: 32}) for row in batch]
    assert [(row.first, row.num_rows, row.start, row.end) for row in runs] == [
        *((0, 22, 10, 31), (22, 16, 32, 47)),
        *((38, 1, 48, 48), (39, 1, 49, 49)),
    ]
    assert {row.end for row in runs} >= {31}


def test_nodes_start_from_their_parents():
    span = Span(slot=0, start=10, num_chain=1, tree=TokenTree((-1, -1, 0, 1)))
    starts = {row.first: row.start for batch in _schedule([span], {}) for row in batch}
    assert starts == {0: 10, 1: 11, 2: 11, 3: 12, 4: 13}


class Summing(nn.Module):
    """Adds up its inputs; a sum of several rows begins at zero, as a scan of Mamba 1 does."""

    def forward(self, hidden_states: Tensor, cache: StackedStates, attention_mask: None) -> Tensor:
        before = cache.get_recurrent_state(0)
        is_first = before is None or hidden_states.shape[1] > 1
        sums = hidden_states.cumsum(1) + (0 if is_first else before[:, None])
        cache.update_recurrent_state(sums[:, -1], 0)
        return sums


def test_a_module_that_cannot_continue_by_several_rows_takes_them_one_by_one(store):
    current = RecurrentPass(store)
    packed = PackedRecurrence(Summing(), 0, current, by_row=True)
    slots = [store.reserve(), store.reserve()]
    for start in (0, 6):
        current.begin([Span(slot=slot, start=start, num_chain=6) for slot in slots])
        for slot in slots:
            store.claim(slot, start, 6)
        sums = packed(torch.ones(1, 12, 1))
        assert sums.flatten().tolist() == 2 * [*range(start + 1, start + 7)]
        for slot in slots:
            store.commit(slot, range(6))


def test_a_snapshot_holds_no_memory_of_its_pass(store):
    slot = second_text(store)
    batch = torch.zeros(50, 1)
    store.due[slot] = 44
    store.claim(slot, 43, 2)
    for row in (43, 44):
        store.put_state(slot, row, 0, {KEY: batch[row : row + 1]})
    store.commit(slot, [0, 1])
    copy = store.fork(slot, 44)
    held = store.state_before(copy, 44, 0)[KEY]
    assert held.untyped_storage().nbytes() == held.nbytes
