"""Rows of one span that see each other in both directions, against a dense mask in transformers."""

from __future__ import annotations

import pytest
import torch
from tests import tiny
from tests.contract.conftest import NETWORKS, RUNNERS, SPECIAL, VOCAB_SIZE, random_network
from tests.contract.test_language_model import feed, score, text
from tests.natives import native_model
from tests.tabular import TabularModel
from torch import Tensor
from transformers import PreTrainedModel

from forerun.models.base import Context, Span
from forerun.theory.tree import TokenTree

BLOCKS = [
    *(
        (name, runner)
        for runner in ("torch", "rectangles", "native", "native-2")
        for name in NETWORKS
    ),
    *((name, "eager") for name in (*NETWORKS, *SPECIAL)),
    *((name, "native") for name in tiny.NATIVE),
    ("qwen3", "traced"),
]


def dense_logits(network: PreTrainedModel, ids: list[int], num_prefix: int) -> Tensor:
    """Logits of rows of which those from `num_prefix` on see all of each other."""
    num_rows = len(ids)
    seen = torch.ones(num_rows, num_rows, dtype=torch.bool).tril()
    seen[num_prefix:, num_prefix:] = True
    positions = torch.arange(num_rows)
    near = positions[:, None] - positions < tiny.WINDOW

    def bias(visible: Tensor) -> Tensor:
        return torch.zeros(1, 1, num_rows, num_rows).masked_fill(~visible, -torch.inf)

    kinds = getattr(network.config, "layer_types", None)
    window = getattr(network.config, "sliding_window", None)
    mask: object = bias(seen if window is None else seen & near)
    if kinds is not None:
        mask = {"full_attention": bias(seen), "sliding_attention": bias(seen & near)}
    return network(torch.tensor([ids]), attention_mask=mask, position_ids=positions[None]).logits[0]


@pytest.mark.covering
@pytest.mark.parametrize("num_block", [1, 6, 20])
@pytest.mark.parametrize(("name", "runner"), BLOCKS)
def test_rows_of_a_block_see_each_other(name, runner, num_block):
    network = random_network(name)
    model = RUNNERS[runner](network)
    ids = text(9 + num_block, seed=num_block)
    context, other = Context(model.store, ids), Context(model.store, text(12, 5))
    feed(model, context, 9)
    block = Span(slot=context.slot, start=9, num_chain=num_block, causal=False)
    logits = score(model, [(block, ids[9:]), (other.span(12), other.ids)])
    expected = dense_logits(network, ids, 9)[9:]
    torch.testing.assert_close(logits[:num_block], expected, atol=1e-4, rtol=1e-4)
    causal = network(torch.tensor([other.ids])).logits[0]
    torch.testing.assert_close(logits[num_block:], causal, atol=1e-4, rtol=1e-4)


def test_a_block_differs_from_a_causal_chain():
    """What the test above compares would otherwise be the same with a causal mask."""
    network = random_network("llama")
    ids = text(15)
    causal = network(torch.tensor([ids])).logits[0]
    assert (dense_logits(network, ids, 9)[9:14] - causal[9:14]).abs().max() > 0.05


def test_long_blocks_are_not_cut():
    """Longer than the blocks in which chains attend."""
    network = random_network("llama")
    model = RUNNERS["eager"](network)
    ids = text(100)
    context = Context(model.store, ids)
    span = Span(slot=context.slot, start=0, num_chain=100, causal=False)
    expected = dense_logits(network, ids, 0)
    torch.testing.assert_close(score(model, [(span, ids)]), expected, atol=1e-4, rtol=1e-4)


def test_a_block_has_no_tree_and_no_table_model():
    with pytest.raises(ValueError, match="cannot have a tree"):
        Span(slot=0, start=0, num_chain=1, tree=TokenTree.chain(1), causal=False)
    model = TabularModel.from_seed(0, vocab_size=VOCAB_SIZE)
    context = Context(model.store, [1, 2])
    with pytest.raises(ValueError, match="causal spans only"):
        score(model, [(Span(slot=context.slot, start=0, num_chain=2, causal=False), [1, 2])])


def test_blocks_may_be_staged_again_before_a_commit():
    """A block drafter's rows are never committed; the causal rows after them must not notice."""
    network = random_network("qwen3")
    model = native_model(network, max_context=300)
    ids = text(12)
    context = Context(model.store, ids)
    feed(model, context, 11)
    block = Span(slot=context.slot, start=11, num_chain=5, causal=False)
    score(model, [(block, [ids[-1], 1, 2, 3, 4])])
    expected = network(torch.tensor([ids])).logits[0, -1:]
    torch.testing.assert_close(feed(model, context), expected, atol=1e-4, rtol=1e-4)
