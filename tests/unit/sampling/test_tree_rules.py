"""Tree rules: what they become on chains, what they accept, and the draw stage."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from forerun.sampling import chain, tree_rules
from forerun.sampling.kernels import sampling_kernels
from forerun.sampling.tree_rules import (
    TreeWeights,
    accepted_node,
    expected_accepted,
    post_order,
    tree_keys,
    tree_weights,
    verify_trees,
)
from forerun.theory.tree import TokenTree, expanded

TREE = TokenTree((-1, -1, 0, 0, 1, 3))
VOCAB = 5


def random_probs(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, VOCAB, dtype=torch.float64, generator=generator).softmax(-1)


def weights_of(tree: TokenTree, seed: int = 0) -> tuple[TreeWeights, torch.Tensor]:
    target = random_probs(4, len(tree.parents) + 1, seed=seed)
    draft = random_probs(4, len(expanded(tree)), seed=seed + 1)
    generator = torch.Generator().manual_seed(seed + 2)
    tokens = torch.zeros(4, len(tree.parents), dtype=torch.int64)
    for row, parent in enumerate(expanded(tree)):  # siblings differ
        children = tree.children(parent)
        drawn = draft[:, row].multinomial(len(children), generator=generator)
        tokens[:, list(children)] = drawn
    return tree_weights(tree, target, draft, tokens), tokens


def normalised(rows: torch.Tensor) -> torch.Tensor:
    return rows / rows.sum(-1, keepdim=True)


def expectations(tree: TokenTree, found: TreeWeights) -> torch.Tensor:
    """Expected number of accepted nodes of every tree of a batch."""
    rows = found.accept.tolist()
    return torch.tensor([expected_accepted(tree, row) for row in rows], dtype=torch.float64)


def test_orders():
    assert expanded(TREE) == (-1, 0, 1, 3)
    assert post_order(TREE) == (2, 5, 3, 0, 4, 1)
    assert post_order(TokenTree(())) == ()


def test_on_a_chain_it_is_block_verification():
    tree = TokenTree.chain(3)
    target, draft = random_probs(8, 4, seed=5), random_probs(8, 3, seed=6)
    tokens = torch.randint(0, VOCAB, (8, 3), generator=torch.Generator().manual_seed(7))
    counts = torch.full((8,), 3)
    found = tree_weights(tree, target, draft, tokens)
    torch.testing.assert_close(
        found.accept, chain.accept_probs(target, draft, tokens, counts, "block")
    )
    for accepted in range(4):
        expected = chain.final_weights(
            target, draft, tokens, counts, torch.full((8,), accepted), "block"
        )
        torch.testing.assert_close(normalised(found.final[:, accepted]), normalised(expected))
    torch.testing.assert_close(
        expectations(tree, found), chain.expected_accepted(found.accept, "block")
    )


def test_expectation_is_that_of_the_draw_stage():
    found, _ = weights_of(TREE)
    expected = torch.zeros(4, dtype=torch.float64)
    for passed in product((False, True), repeat=6):
        prob = torch.where(torch.tensor(passed), found.accept, 1 - found.accept).prod(-1)
        node = accepted_node(TREE, passed)
        expected += prob * len(TREE.path(node))
    torch.testing.assert_close(expectations(TREE, found), expected)


def test_the_draw_stage_takes_the_first_leaf_that_passes():
    def of(*nodes):
        return accepted_node(TREE, [node in nodes for node in range(6)])

    assert of() == -1
    assert of(5) == 5
    assert of(5, 2) == 2
    assert of(0, 4) == 0
    assert of(1) == 1


def test_float32_agrees_with_float64():
    target, draft = random_probs(3, 7, seed=1), random_probs(3, 4, seed=2)
    tokens = torch.tensor([[0, 1, 2, 3, 4, 0]]).expand(3, 6)
    full = tree_weights(TREE, target, draft, tokens)
    half = tree_weights(TREE, target.float(), draft.float(), tokens)
    torch.testing.assert_close(half.accept.double(), full.accept, atol=1e-4, rtol=1e-4)
    assert half.accept.dtype is half.final.dtype is torch.float32
    assert (half.final.sum(-1) > 0).all()


def test_no_key_occurs_twice():
    keys = [key for length in range(4) for part in tree_keys(9, length, 5) for key in part]
    assert len(set(keys)) == len(keys) == 4 * (5 + 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_hot_rows_leave_no_nan(dtype):
    tree = TokenTree((-1, 0, 1))
    tokens = torch.tensor([[2, 2, 2], [2, 2, 2]])
    draft = torch.eye(VOCAB, dtype=dtype)[tokens]
    target = torch.eye(VOCAB, dtype=dtype)[torch.tensor([[2, 2, 2, 0], [2, 1, 2, 0]])]
    found = tree_weights(tree, target, draft, tokens)
    assert not found.accept.isnan().any()
    assert not found.final.isnan().any()
    assert found.accept[0].tolist() == [1, 1, 1]
    assert (found.final.sum(-1) > 0).all()
    assert found.final[1, 1].tolist() == [0, 1, 0, 0, 0]
    assert expectations(tree, found).tolist() == [3, 1]


def test_a_node_of_acceptance_probability_0_is_rejected_by_the_smallest_noise(monkeypatch):
    """Strict: u < a. A token that the target never emits must not pass with u = 0."""
    monkeypatch.setattr(
        tree_rules, "uniform", lambda keys: torch.zeros(keys.shape, dtype=torch.float64)
    )
    monkeypatch.setattr(tree_rules, "kernels_for", lambda *rows: None)
    tree = TokenTree((-1, 0))
    target = torch.tensor([[0.0, 1, 0, 0, 0], [0.0, 0, 1, 0, 0], [1.0, 0, 0, 0, 0]])
    draft = torch.tensor([[0.5, 0.5, 0, 0, 0], [0.5, 0.5, 0, 0, 0]])
    (found,) = verify_trees([tree], target, [draft], torch.tensor([3, 0, 1]), [tree_keys(1, 2, 2)])
    assert found.path == ()
    assert found.tokens == (1,)
    assert found.expected_accepted == 0


def drawn_trees(
    seed: int,
) -> tuple[list[TokenTree], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three trees of different shapes with rows and tokens, packed as a pass packs them."""
    trees = [TREE, TokenTree.chain(2), TokenTree((-1, -1, -1, 1, 1))]
    rows, drafts, fed = [], [], []
    generator = torch.Generator().manual_seed(seed)
    for tree in trees:
        rows.append(random_probs(len(tree.parents) + 1, seed=seed + len(tree.parents)))
        draft = random_probs(len(expanded(tree)), seed=seed + 20 + len(tree.parents))
        tokens = [4] + [0] * len(tree.parents)
        for row, parent in enumerate(expanded(tree)):
            children = tree.children(parent)
            drawn = draft[row].multinomial(len(children), generator=generator).tolist()
            for child, token in zip(children, drawn, strict=True):
                tokens[child + 1] = token
        drafts.append(normalised(draft))
        fed += tokens
    return trees, torch.cat(rows), torch.cat(drafts), torch.tensor(fed)


@pytest.mark.parametrize("seed", range(8))
def test_trees_of_a_batch_are_verified_as_if_alone(seed):
    trees, target, draft, fed = drawn_trees(seed)
    sizes = [len(expanded(tree)) for tree in trees]
    drafts = list(draft.split(sizes))
    keys = [tree_keys(seed, index, len(tree.parents)) for index, tree in enumerate(trees)]
    together = verify_trees(trees, target, drafts, fed, keys)
    row = parent = 0
    for index, tree in enumerate(trees):
        own = slice(row, row := row + len(tree.parents) + 1)
        drafted = slice(parent, parent := parent + len(expanded(tree)))
        (alone,) = verify_trees([tree], target[own], [draft[drafted]], fed[own], [keys[index]])
        assert alone == together[index]
        weights = tree_weights(tree, target[own][None], draft[drafted][None], fed[own][None, 1:])
        assert alone.expected_accepted == pytest.approx(float(expectations(tree, weights)))
        assert alone.is_valid


def test_nothing_is_accepted_behind_a_row_without_a_distribution():
    """Without the row, its descendants do not exist; with it accepted, the outcome is not valid."""
    ended, seen_valid = 0, 0
    for seed in range(40):
        trees, target, draft, fed = drawn_trees(seed)
        target, draft, fed = target[:7], draft[:4], fed[:7]
        target[1] = torch.nan  # the row of node 0, whose descendants are 2, 3 and 5
        keys = [tree_keys(seed, 0, 6)]
        (found,) = verify_trees(trees[:1], target, [draft], fed, keys)
        assert found.is_valid == (0 not in found.path)
        # The same tree without the descendants, under the same noise.
        small = TokenTree((-1, -1, 1))
        kept = [0, 1, 2, 5]
        tests, finals = keys[0]
        some = [([tests[n] for n in (0, 1, 4)], [finals[n] for n in kept])]
        target[1] = 0.2
        (alone,) = verify_trees([small], target[kept], [draft[[0, 2]]], fed[kept], some)
        assert found.is_valid == (0 not in alone.path)
        ended += not found.is_valid
        if found.is_valid:
            seen_valid += 1
            assert tuple({1: 1, 2: 4}[node] for node in alone.path) == found.path
            assert alone.tokens == found.tokens
    assert ended
    assert seen_valid


@pytest.mark.parametrize("seed", range(8))
def test_the_kernels_verify_as_the_torch_code_does(seed, monkeypatch):
    trees, target, draft, fed = drawn_trees(seed)
    target, draft = target.float(), draft.float()
    if seed % 2:
        target[1] = torch.nan
    drafts = list(draft.split([len(expanded(tree)) for tree in trees]))
    keys = [tree_keys(seed, index, len(tree.parents)) for index, tree in enumerate(trees)]
    assert tree_rules.kernels_for(target) is not None
    fast = verify_trees(trees, target, drafts, fed, keys)
    monkeypatch.setattr(tree_rules, "kernels_for", lambda *rows: None)
    slow = verify_trees(trees, target, drafts, fed, keys)
    for ours, theirs in zip(fast, slow, strict=True):
        assert ours.path == theirs.path
        assert ours.is_valid == theirs.is_valid
        assert ours.expected_accepted == pytest.approx(theirs.expected_accepted, rel=1e-5)
        assert not ours.is_valid or ours.tokens == theirs.tokens


def test_the_kernels_have_the_weights_of_the_torch_code():
    kernels = sampling_kernels()
    assert kernels is not None
    target, draft = random_probs(64, 7, seed=1), random_probs(64, 4, seed=2)
    tokens = (
        torch.stack([random_probs(seed=seed).multinomial(6) for seed in range(0)] or [])
        if False
        else torch.tensor([[0, 1, 2, 3, 4, 0]]).expand(64, 6)
    )
    accept, weights = kernels.tree_weights(TREE, target, draft, tokens)
    found = tree_weights(TREE, target, draft, tokens)
    torch.testing.assert_close(accept, found.accept)
    torch.testing.assert_close(normalised(weights), normalised(found.final))
