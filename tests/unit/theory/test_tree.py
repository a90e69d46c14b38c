from __future__ import annotations

import pytest

from forerun.theory.tree import TokenTree

#      -1
#     /  \
#    0    1
#   / \    \
#  2   4    3
#           |
#           5
BUSH = TokenTree((-1, -1, 0, 1, 0, 3))


def test_depth_counts_tokens_after_the_committed_text():
    assert BUSH.depths == (1, 1, 2, 2, 2, 3)


def test_children_come_in_draw_order():
    assert BUSH.children(-1) == (0, 1)
    assert BUSH.children(0) == (2, 4)
    assert BUSH.children(5) == ()


def test_path_runs_from_the_root_down():
    assert BUSH.path(5) == (1, 3, 5)
    assert BUSH.path(0) == (0,)
    assert BUSH.path(-1) == ()


def test_ancestor_mask_sees_self_and_ancestors():
    seen = [[i for i, visible in enumerate(row) if visible] for row in BUSH.ancestor_mask()]
    assert seen == [[0], [1], [0, 2], [1, 3], [0, 4], [1, 3, 5]]


@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_chain_is_a_tree(length):
    chain = TokenTree.chain(length)
    assert chain == TokenTree(tuple(range(-1, length - 1)))
    assert chain.is_chain
    assert chain.depths == tuple(range(1, length + 1))
    assert chain.path(length - 1) == tuple(range(length))


def test_a_chain_is_made_once():
    assert TokenTree.chain(5) is TokenTree.chain(5)


@pytest.mark.parametrize("parents", [(-1, -1), (-1, 0, 0), (-1, 0, -1)])
def test_a_tree_with_siblings_is_no_chain(parents):
    assert not TokenTree(parents).is_chain


def test_trees_are_equal_by_topology():
    assert TokenTree((-1, 0)) == TokenTree.chain(2)
    assert hash(TokenTree((-1, 0))) == hash(TokenTree.chain(2))
    assert TokenTree((-1, 0)) != TokenTree((-1, -1))


@pytest.mark.parametrize(
    ("parents", "node", "parent"), [((0,), 0, 0), ((-1, 2, 0), 1, 2), ((-1, 0, -2), 2, -2)]
)
def test_a_parent_that_is_no_earlier_node_is_named(parents, node, parent):
    with pytest.raises(ValueError, match=f"parent of node {node} is {parent};"):
        TokenTree(parents)


def test_a_negative_chain_is_refused():
    with pytest.raises(ValueError, match="-1 nodes"):
        TokenTree.chain(-1)
