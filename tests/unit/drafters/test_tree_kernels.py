"""Trees that the CPU kernels grow in one call equal those grown by one pass per level."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests import heads, tiny
from tests.natives import native_model
from tests.unit.drafters.test_draft_trees import SHAPES, WALKED, accepted_rows, plain, run

from forerun.control.base import Plan, Tree
from forerun.drafters.base import DraftRequest
from forerun.models.base import WrappedModel
from forerun.sampling.proposal import Proposal

pytestmark = pytest.mark.usefixtures("unchecked")

BY_KERNELS = {
    "greedy": WALKED["greedy"],
    "walk": replace(WALKED["walk"], temperature=0.7),
    "penalised": WALKED["penalised"],
}


def check_equal(left: Sequence[Proposal], right: Sequence[Proposal]) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert (one.tree, one.stop_reason) == (other.tree, other.stop_reason)


@pytest.mark.parametrize("params", BY_KERNELS.values(), ids=BY_KERNELS)
@pytest.mark.parametrize("is_head", [False, True], ids=["draft model", "head"])
def test_the_kernels_grow_the_trees_of_passes_over_single_levels(params, is_head):
    """Later steps depend on the rows that were committed of earlier trees."""
    network, params = tiny.network(num_layers=4), replace(params, max_tokens=24)
    expected = plain(native_model(network), params, prompts=tiny.PROMPTS)
    found, rows = {}, {}
    for way in ("kernels", "levels"):
        target = native_model(network)
        if is_head:
            drafter = heads.eagle3_drafter(target, heads.eagle3_head(target))
        else:
            drafter = tiny.drafting(native_model(tiny.network(num_layers=4, jitter=0.02)))
        if way == "levels":
            drafter.model = WrappedModel(drafter.model)
        rows[way] = accepted_rows(drafter.model.store)
        shapes = (*SHAPES[:1], *SHAPES[2:4])
        texts, seen = run(target, drafter, params, *shapes, prompts=tiny.PROMPTS)
        found[way] = seen.found
        assert texts == expected
        assert is_head or max(seen.accepted) > 1
        assert drafter.model.store.num_free == 4
    check_equal(found["kernels"], found["levels"])
    assert rows["kernels"] == rows["levels"]  # neither reads a node that cannot have a child


def test_the_last_pass_may_read_every_node_of_a_full_tree(caplog):
    """A draft that is sure of itself expands even the node that entered its tree last."""
    network, draft = tiny.network(num_layers=4), tiny.network(num_layers=4, jitter=0.02)
    with torch.no_grad():
        draft.get_output_embeddings().weight.mul_(8.0)
    params = replace(WALKED["greedy"], max_tokens=64)
    shapes = (Tree(num_nodes=12, depth=6, width=4), Tree(num_nodes=16, depth=5, width=4))
    drafter = tiny.drafting(native_model(draft))
    with caplog.at_level(logging.INFO, logger="forerun.drafting"):
        texts, seen = run(
            native_model(network), drafter, params, *shapes, prompts=tiny.PROMPTS, k=16
        )
    assert texts == plain(native_model(network), params, prompts=tiny.PROMPTS)
    assert max(map(len, (proposal.tree.parents for proposal in seen.found))) == 16
    assert not caplog.messages


@pytest.mark.parametrize("vocab_size", [tiny.VOCAB_SIZE - 250, tiny.VOCAB_SIZE + 3])
def test_the_kernels_draft_tokens_of_the_target_alone(vocab_size):
    found = []
    for wrap in (lambda model: model, WrappedModel):
        drafter = tiny.drafting(wrap(native_model(tiny.network())), vocab_size)
        request = DraftRequest(
            request_id="r",
            ids=[3, 5, 7],
            num_prompt=3,
            params=WALKED["greedy"],
            noise_key=1,
            history=None,
            coupled=False,
        )
        plan = Plan(method="draft_model", shape=Tree(num_nodes=12, depth=4, width=8))
        found += drafter.propose([request], [plan])
    check_equal(found[:1], found[1:])
    assert found[0].num_drafted == 12


def test_the_greedy_path_of_the_kernels_costs_no_gather():
    network = tiny.network()
    twin = native_model(network)
    rows = accepted_rows(twin.store)
    run(native_model(network), tiny.drafting(twin), WALKED["greedy"], SHAPES[0])
    assert all(each == list(range(len(each))) for each in rows)
    assert max(map(len, rows[4:])) > 1


def test_the_kernels_draft_nothing_where_no_distribution_is_valid(caplog):
    network = tiny.network()
    expected = plain(native_model(network), WALKED["greedy"])
    broken = tiny.network(seed=1)
    broken.get_output_embeddings().weight.data.fill_(torch.nan)
    target = native_model(network)
    texts, _ = run(target, tiny.drafting(native_model(broken)), WALKED["greedy"], SHAPES[0])
    assert texts == expected
    assert "draft's probabilities for request" in caplog.text
