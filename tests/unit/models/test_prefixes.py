"""What slots keep for sequences that begin alike, and which slot such a sequence gets."""

from __future__ import annotations

import pytest
from tests.tabular import TokenStore

from forerun.models.base import Context, Span
from forerun.models.kv_store import MIN_SHARED_TOKENS, count_common

LONG = list(range(100, 140))


@pytest.fixture
def store() -> TokenStore:
    return TokenStore(num_slots=3, capacity=80, max_staged_rows=4)


def read(store: TokenStore, ids: list[int], scope: str | None = "") -> Context:
    """A sequence whose tokens are all in the KV."""
    context = Context(store, list(ids), scope)
    span: Span = context.span(context.num_pending)
    store.stage(context.slot, span.start, context.pending())
    context.commit(range(span.num_chain))
    return context


def kept(store: TokenStore, ids: list[int], scope: str | None = "") -> int:
    context = read(store, ids, scope)
    context.close(context.num_cached)
    return context.slot


def holds(context: Context) -> list[int]:
    store = context.store
    assert isinstance(store, TokenStore)
    return store.tokens(context.slot, context.num_cached)


@pytest.mark.parametrize(
    ("left", "right", "length"),
    [
        ([], [], 0),
        ([1], [2], 0),
        ([1, 2], [1, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([5] * 9, [5] * 9, 9),
    ],
)
def test_common_length(left, right, length):
    assert count_common(left, right) == count_common(right, left) == length


def test_common_length_wherever_two_lists_part():
    for length in range(len(LONG)):
        assert count_common(LONG, [*LONG[:length], -1, *LONG[length + 1 :]]) == length


def test_a_sequence_goes_on_in_the_slot_that_holds_its_beginning(store):
    slot = kept(store, LONG[:30])
    context = Context(store, [*LONG[:30], 7, 8], "")
    assert (context.slot, context.num_cached, context.num_pending) == (slot, 30, 2)
    assert holds(context) == LONG[:30]
    assert store.num_free == 2


def test_the_last_token_is_always_fed(store):
    kept(store, LONG)
    context = Context(store, list(LONG), "")
    assert context.num_pending == 1
    assert holds(context) == LONG[:-1]


def test_the_slot_of_a_running_sequence_is_copied(store):
    running = read(store, LONG[:30])
    context = Context(store, [*LONG[:25], 7, 8, 9], "")
    assert context.slot != running.slot
    assert holds(context) == LONG[:25]
    assert holds(running) == LONG[:30]


def test_what_a_running_sequence_has_staged_is_not_taken(store):
    running = read(store, LONG[:20])
    running.ids += LONG[20:30]
    store.stage(running.slot, 20, LONG[20:30])
    assert Context(store, list(LONG), "").num_cached == 20


def test_of_several_the_longest_serves(store):
    kept(store, [*LONG[:20], 1, 1])
    longest = kept(store, [*LONG[:18], 2, *LONG])
    context = Context(store, [*LONG[:18], 2, *LONG, 9], "")
    assert context.slot == longest
    assert context.num_cached == 19 + len(LONG)


def test_a_short_match_is_not_worth_a_copy(store):
    kept(store, LONG)
    few = MIN_SHARED_TOKENS - 1
    assert Context(store, [*LONG[:few], 1, 2], "").num_cached == 0
    assert Context(store, [*LONG[: few + 1], 1, 2], "").num_cached == few + 1


@pytest.mark.parametrize("scope", ["b", "", None])
def test_other_scopes_find_nothing(store, scope):
    kept(store, LONG, "a")
    read(store, LONG, "a")
    assert Context(store, list(LONG), scope).num_cached == 0


def test_without_a_scope_nothing_is_kept(store):
    kept(store, LONG, None)
    assert Context(store, list(LONG), "").num_cached == 0


def test_a_slot_given_back_without_keeping_is_forgotten(store):
    read(store, LONG).close()
    assert Context(store, list(LONG), "").num_cached == 0


def test_only_the_part_that_may_be_kept_is(store):
    context = read(store, LONG)
    context.close(20)
    assert Context(store, list(LONG), "").num_cached == 20


def test_a_kept_slot_cannot_be_given_back_again(store):
    slot = kept(store, LONG)
    for operation in (store.free, store.length, lambda s: store.keep(s, 1)):
        with pytest.raises(ValueError, match=f"slot {slot} "):
            operation(slot)


def test_kept_slots_are_free_and_the_oldest_goes_first(store):
    first, second, third = (kept(store, [n, *LONG]) for n in range(3))
    assert len({first, second, third}) == store.num_free == 3
    assert Context(store, [9] * 30, "").slot == first
    assert Context(store, [0, *LONG], "").num_cached == 0
    assert Context(store, [2, *LONG, 1], "").slot == third
    assert store.num_free == 0


def test_a_match_is_used_so_it_is_no_longer_the_oldest(store):
    used, unused = kept(store, [0, *LONG]), kept(store, [1, *LONG])
    copy = Context(store, [0, *LONG[:20], 5], "")  # into the empty slot
    assert copy.slot not in (used, unused)
    assert Context(store, [9] * 30, "").slot == unused


def test_taking_a_slot_over_loses_no_more_than_the_copy_would(store):
    """With every slot kept: a tail of 10 tokens against a whole sequence of 17, then of 5."""
    kept(store, [0] * 17)
    long = kept(store, LONG)
    kept(store, [2] * 60)
    context = Context(store, [*LONG[:30], 1], "")
    assert context.slot == long
    context.close(context.num_cached)

    store = TokenStore(num_slots=2, capacity=80, max_staged_rows=4)
    short, long = kept(store, [0] * 5), kept(store, LONG)
    context = Context(store, [*LONG[:30], 1], "")
    assert context.slot == short
    assert Context(store, [*LONG, 1], "").slot == long


def test_the_only_slot_is_cut_to_what_serves():
    store = TokenStore(num_slots=1, capacity=80, max_staged_rows=4)
    kept(store, LONG)
    context = Context(store, [*LONG[:20], 1, 2], "")
    assert holds(context) == LONG[:20]
    store.stage(context.slot, 20, [1, 2])
    context.commit(range(2))
    assert holds(context) == [*LONG[:20], 1, 2]
