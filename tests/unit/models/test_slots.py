"""Misuse of a store is refused, whatever the store holds."""

from __future__ import annotations

import pytest
import torch
from tests.tabular import TokenStore

from forerun.errors import NotEnoughMemory
from forerun.models.kv_store import KVPrefix, count_in_place

PREFIX = KVPrefix(num_tokens=5, tensors=(torch.arange(5),))


@pytest.fixture
def table() -> TokenStore:
    return TokenStore(num_slots=2, capacity=10, max_staged_rows=3)


def test_slots_run_out(table):
    assert [table.reserve(), table.reserve()] == [0, 1]
    with pytest.raises(NotEnoughMemory, match=r"all 2 slots .* max_batch"):
        table.reserve()
    table.free(0)
    assert table.num_free == 1
    assert table.reserve() == 0


@pytest.mark.parametrize("operation", ["free", "length"])
def test_unreserved_slot_is_refused(table, operation):
    with pytest.raises(ValueError, match="slot 1 is not reserved"):
        getattr(table, operation)(1)


def test_staging_over_committed_rows_is_refused(table):
    slot = table.reserve()
    table.stage(slot, 0, [0] * 4)
    table.commit(slot, range(4))
    with pytest.raises(ValueError, match="start at 3; 4 tokens are committed"):
        table.stage(slot, 3, [0] * 1)


def test_staging_past_a_gap_is_refused(table):
    slot = table.reserve()
    table.stage(slot, 0, [0] * 4)
    with pytest.raises(ValueError, match="start at 5; 0 tokens are committed and 4 rows written"):
        table.stage(slot, 5, [0] * 1)


def test_staging_beyond_the_head_room_is_refused(table):
    slot = table.reserve()
    table.stage(slot, 0, [0] * 13)
    with pytest.raises(NotEnoughMemory, match="would hold 14 rows; there is room for 10 tokens"):
        table.stage(slot, 0, [0] * 14)


def test_committing_beyond_the_capacity_is_refused(table):
    slot = table.reserve()
    table.stage(slot, 0, [0] * 13)
    with pytest.raises(NotEnoughMemory, match=r"would commit 11 tokens.* max_context"):
        table.commit(slot, range(11))


@pytest.mark.parametrize("rows", [[1, 0], [0, 0], [-1, 0], range(2, -1, -1)])
def test_rows_out_of_order_are_refused(table, rows):
    slot = table.reserve()
    table.stage(slot, 0, [0] * 4)
    with pytest.raises(ValueError, match="not ascending"):
        table.commit(slot, rows)


def test_rows_never_staged_are_refused(table):
    slot = table.reserve()
    table.stage(slot, 0, [0] * 4)
    with pytest.raises(ValueError, match="row 4 of slot 0 is not among its 4 staged"):
        table.commit(slot, range(5))
    table.commit(slot, range(2))
    with pytest.raises(ValueError, match="row 0 of slot 0 is not among its 0 staged"):
        table.commit(slot, [0])


def test_a_slot_cut_back_goes_on_from_there(table):
    slot = table.reserve()
    table.import_prefix(slot, PREFIX)
    table.stage(slot, 5, [0] * 2)
    table.cut(slot, 3)
    assert table.length(slot) == 3
    with pytest.raises(ValueError, match="3 tokens are committed and 3 rows written"):
        table.stage(slot, 4, [0] * 1)
    table.stage(slot, 3, [0] * 1)
    with pytest.raises(ValueError, match="holds 3"):
        table.cut(slot, 4)


def test_only_an_empty_slot_can_be_filled(table):
    slot = table.reserve()
    table.stage(slot, 0, [0] * 1)
    with pytest.raises(ValueError, match="holds 1 rows; it must be empty"):
        table.import_prefix(slot, PREFIX)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [([], 0), (range(5), 5), ([0, 1, 2], 3), ([1], 0), ([0, 1, 3], 2), (range(1, 4), 0)],
)
def test_rows_already_in_place(rows, expected):
    assert count_in_place(rows) == expected
