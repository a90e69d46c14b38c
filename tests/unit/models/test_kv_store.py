"""What the contiguous store allocates and when it moves data; histories are in tests/property."""

from __future__ import annotations

import pytest
import torch

from forerun.models.kv_store import BlockedKVStore, ContiguousKVStore
from forerun.models.memory import KVGeometry, count_bytes

GEOMETRY = KVGeometry(
    num_layers=3,
    num_kv_heads=2,
    head_dim=4,
    num_slots=2,
    capacity=10,
    max_staged_rows=5,
    dtype=torch.bfloat16,
)


@pytest.fixture
def store() -> ContiguousKVStore:
    return ContiguousKVStore(GEOMETRY, torch.device("cpu"))


def test_bytes_needed():
    assert count_bytes(GEOMETRY) == 2 * 3 * 2 * 2 * 16 * 4 * 2


def test_stage_gives_a_place_per_layer_for_keys_and_values(store):
    views = store.stage(store.reserve(), 0, 7)
    assert len(views) == 6
    assert {view.shape for view in views} == {(1, 2, 7, 4)}
    assert len({view.data_ptr() for view in views}) == 6


def test_committing_a_prefix_moves_nothing(store):
    slot = store.reserve()
    (keys, *_) = store.stage(slot, 0, 5)
    version = keys._version
    store.commit(slot, [0, 1, 2])
    assert keys._version == version
    store.stage(slot, 3, 3)
    store.commit(slot, [0, 2])
    assert keys._version > version


def test_prefix_survives_the_slot(store):
    slot = store.reserve()
    for index, view in enumerate(store.stage(slot, 0, 4)):
        view.fill_(index)
    store.commit(slot, range(4))
    prefix = store.export_prefix(slot, 3)
    for view in store.window(slot, 0, 4):
        view.fill_(-1)
    other = store.reserve()
    store.import_prefix(other, prefix)
    assert store.length(other) == prefix.num_tokens == 3
    assert [view.unique().item() for view in store.window(other, 0, 3)] == list(range(6))


@pytest.mark.parametrize("num_tokens", [-1, 3])
def test_only_committed_tokens_are_exported(store, num_tokens):
    slot = store.reserve()
    store.stage(slot, 0, 5)
    store.commit(slot, range(2))
    with pytest.raises(ValueError, match=f"prefix of {num_tokens} tokens of slot 0.* holds 2"):
        store.export_prefix(slot, num_tokens)


def test_import_into_a_used_slot_is_refused(store):
    slot = store.reserve()
    store.stage(slot, 0, 1)
    store.commit(slot, [0])
    with pytest.raises(ValueError, match="must be empty"):
        store.import_prefix(slot, store.export_prefix(slot, 1))


def test_only_rows_out_of_place_are_copied(monkeypatch):
    store = ContiguousKVStore(GEOMETRY, torch.device("cpu"))
    slot = store.reserve()
    store.stage(slot, 0, 6)
    copied = []
    select = torch.Tensor.index_select

    def noted(tensor, dim, rows):
        copied.append(rows.tolist())
        return select(tensor, dim, rows)

    monkeypatch.setattr(torch.Tensor, "index_select", noted)
    store.commit(slot, [0, 1, 3, 5])
    assert copied == [[3, 5]]


def test_the_layout_of_the_kernels_keeps_pairs_of_bf16_together():
    store = BlockedKVStore(GEOMETRY, torch.device("cpu"))
    slot = store.reserve()
    store.claim(slot, 0, 15)
    pairs = store.data[0, slot, 1].view(2, 16, 2)  # one block: words of the head, rows, pair
    pairs.copy_(torch.arange(64).view(16, 2, 2).transpose(0, 1))
    store.commit(slot, [0, 2, 11])
    keys = store.export_prefix(slot, 3).tensors[0][0, 1]
    assert keys.tolist() == [[0, 1, 2, 3], [8, 9, 10, 11], [44, 45, 46, 47]]
    assert pairs[:, 1].tolist() == [[8, 9], [10, 11]]
