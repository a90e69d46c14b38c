"""Tree rules keep the target's distribution on every topology; planted bugs do not."""

from __future__ import annotations

import pytest
import torch
from tests.exact.planted import PLANTED_TREE, PLANTED_TREES, traversal

from forerun.doctor.exact.run import MAX_TREE_DEPTH, SECOND_TREE, horizon_of
from forerun.doctor.exact.trees import (
    ModelPairs,
    TreeVerifier,
    all_trees,
    emit_trees,
    kernel_weights,
    random_pairs,
    structured_pairs,
)
from forerun.theory.tree import TokenTree

TREES = all_trees(4, MAX_TREE_DEPTH, 3)


def worst_tv(verifier: TreeVerifier, pairs: ModelPairs, tree: TokenTree) -> float:
    joint = emit_trees(pairs, verifier, tree, SECOND_TREE).joint
    return float((joint - pairs.joint()).abs().sum(-1).max() / 2)


def some_pairs(tree: TokenTree, num_pairs: int = 6, vocab_size: int = 3) -> ModelPairs:
    generator = torch.Generator().manual_seed(3)
    return next(random_pairs(num_pairs, vocab_size, horizon_of(tree), generator))


def test_every_topology_keeps_the_distribution():
    assert len(TREES) == 19
    assert all(worst_tv(TreeVerifier(), some_pairs(tree), tree) <= 1e-12 for tree in TREES)


def test_the_kernels_keep_the_distribution_on_every_topology():
    verifier = TreeVerifier(stage=kernel_weights)
    assert all(worst_tv(verifier, some_pairs(tree), tree) <= 1e-12 for tree in TREES)
    pairs = structured_pairs(3, horizon_of(PLANTED_TREE), torch.Generator().manual_seed(1))
    assert worst_tv(verifier, pairs.with_full_drafts(), PLANTED_TREE) <= 1e-12


@pytest.mark.parametrize("parents", [(-1, 0, 0, -1), (-1, 0, -1, 2, 2), (-1, -1, 1, 0)], ids=str)
def test_nodes_may_be_numbered_in_any_topological_order(parents):
    tree = TokenTree(parents)
    assert worst_tv(TreeVerifier(), some_pairs(tree, 3), tree) <= 1e-12


def test_zeros_in_the_target_and_identical_models_are_no_special_case():
    tree = PLANTED_TREE
    pairs = structured_pairs(3, horizon_of(tree), torch.Generator().manual_seed(1))
    assert worst_tv(TreeVerifier(), pairs.with_full_drafts(), tree) <= 1e-12


def test_the_frame_of_the_planted_bugs_is_exact_without_a_bug():
    verifier = TreeVerifier(stage=traversal())
    assert worst_tv(verifier, some_pairs(PLANTED_TREE), PLANTED_TREE) <= 1e-12


@pytest.mark.parametrize(("name", "verifier"), PLANTED_TREES, ids=[n for n, _ in PLANTED_TREES])
def test_each_planted_bug_shows(name, verifier):
    pairs = some_pairs(PLANTED_TREE, 32)
    if name == "tree: position-only noise":
        with pytest.raises(Exception, match="a noise key decides twice"):
            worst_tv(verifier, pairs, PLANTED_TREE)
    else:
        assert worst_tv(verifier, pairs, PLANTED_TREE) > 1e-3
