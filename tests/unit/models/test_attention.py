"""How a pass is cut into blocks and who sees whom."""

from __future__ import annotations

import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from forerun.models import attention
from forerun.models.attention import hide_rows, pieces_of, plan_pass
from forerun.models.base import Span
from forerun.models.kv_store import ContiguousKVStore
from forerun.models.memory import KVGeometry
from forerun.theory.tree import TokenTree

FORK = TokenTree((-1, -1, 0))


def shapes(span: Span) -> list[tuple[int, int, int, bool]]:
    pieces = pieces_of(span, first=5)
    return [(p.first, p.num_rows, p.num_keys, p.tree is not None) for p in pieces]


def test_short_chain_is_one_block():
    assert shapes(Span(slot=0, start=7, num_chain=3)) == [(5, 3, 10, False)]


def test_chain_with_a_drafted_chain_is_one_chain():
    span = Span(slot=0, start=7, num_chain=2, tree=TokenTree.chain(4))
    assert shapes(span) == [(5, 6, 13, False)]


def test_long_chain_is_cut_and_early_blocks_read_fewer_keys():
    assert shapes(Span(slot=0, start=10, num_chain=150)) == [
        (5, 64, 74, False),
        (69, 64, 138, False),
        (133, 22, 160, False),
    ]


def test_tree_shares_the_last_block_of_the_chain():
    assert shapes(Span(slot=0, start=0, num_chain=65, tree=FORK)) == [
        (5, 64, 64, False),
        (69, 4, 68, True),
    ]
    assert shapes(Span(slot=0, start=0, num_chain=64, tree=FORK)) == [(5, 67, 67, True)]


def test_rows_of_a_tree_see_chain_and_ancestors():
    seen = ~hide_rows(5, FORK)
    assert seen.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 1, 0, 1],
    ]


def make_store() -> ContiguousKVStore:
    geometry = KVGeometry(
        num_layers=1,
        num_kv_heads=2,
        head_dim=4,
        num_slots=3,
        capacity=200,
        max_staged_rows=8,
        dtype=torch.float32,
    )
    return ContiguousKVStore(geometry, torch.device("cpu"))


def test_masks_repeat_per_group_and_end_at_the_own_row():
    store = make_store()
    spans = [Span(slot=store.reserve(), start=0, num_chain=3, tree=FORK)]
    (block,) = plan_pass(spans, store, num_groups=2).blocks(None)
    seen = (block.bias == 0).view(2, 6, 6)
    assert torch.equal(seen[0], ~hide_rows(6, FORK))
    assert torch.equal(seen[0], seen[1])


def test_single_row_needs_no_mask():
    store = make_store()
    plan = plan_pass([Span(slot=store.reserve(), start=0, num_chain=1)], store, num_groups=2)
    assert [block.bias for block in plan.blocks(None)] == [None]


def test_chains_of_equal_size_share_a_mask():
    store = make_store()
    slots = [store.reserve() for _ in range(3)]
    for slot, length in zip(slots, (5, 40, 9), strict=True):
        store.stage(slot, 0, length)
        store.commit(slot, range(length))
    spans = [Span(slot=slot, start=store.length(slot), num_chain=4) for slot in slots]
    blocks = plan_pass(spans, store, num_groups=1).blocks(None)
    assert [tuple(block.bias.shape) for block in blocks] == [(4, 9), (4, 44), (4, 13)]
    assert len({block.bias.untyped_storage().data_ptr() for block in blocks}) == 1
    for block in blocks:
        assert torch.equal(block.bias[:, -4:] == 0, ~hide_rows(4))
        assert (block.bias[:, :-4] == 0).all()


def held(store: ContiguousKVStore, length: int) -> int:
    """A slot with `length` committed tokens."""
    slot = store.reserve()
    store.stage(slot, 0, length)
    store.commit(slot, range(length))
    return slot


def test_rows_of_a_window_see_that_many_positions_and_read_no_others():
    store = make_store()
    span = Span(slot=held(store, 10), start=10, num_chain=3)
    (block,) = plan_pass([span], store, num_groups=1).blocks(4)
    assert block.views[0].shape[2] == 6  # what the first row sees, and the rows after it
    assert (block.bias == 0).int().tolist() == [
        [1, 1, 1, 1, 0, 0],
        [0, 1, 1, 1, 1, 0],
        [0, 0, 1, 1, 1, 1],
    ]
    assert torch.equal(block.views[0], store.window(span.slot, 7, 13)[0])


def test_a_window_wider_than_the_text_hides_nothing():
    store = make_store()
    spans = [Span(slot=held(store, 10), start=10, num_chain=3, tree=FORK)]
    plan = plan_pass(spans, store, num_groups=2)
    for wide, everything in zip(plan.blocks(16), plan.blocks(None), strict=True):
        assert torch.equal(wide.bias, everything.bias)


def test_a_window_in_a_tree_is_counted_along_paths():
    store = make_store()
    spans = [Span(slot=held(store, 10), start=10, num_chain=1, tree=FORK)]
    (block,) = plan_pass(spans, store, num_groups=1).blocks(2)
    assert (block.bias == 0).int().tolist() == [
        [1, 1, 0, 0, 0],  # pending: the last committed token and itself
        [0, 1, 1, 0, 0],  # both roots: pending and themselves
        [0, 1, 0, 1, 0],
        [0, 0, 1, 0, 1],  # the first root's child: its parent and itself
    ]


def test_single_row_of_a_window_needs_no_mask():
    store = make_store()
    span = Span(slot=held(store, 10), start=10, num_chain=1)
    (block,) = plan_pass([span], store, num_groups=1).blocks(4)
    assert block.bias is None
    assert torch.equal(block.views[1], store.window(span.slot, 7, 11)[1])


def test_transformers_builds_no_mask_for_us():
    """A mask function under our name would build one for every pass."""
    attention.register()
    assert AttentionInterface()[attention.ATTENTION_NAME] is attention.attend_packed
    assert attention.ATTENTION_NAME not in ALL_MASK_ATTENTION_FUNCTIONS
