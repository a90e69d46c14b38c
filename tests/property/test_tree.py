"""Random topologies against definitions that share no code with the tree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forerun.theory.tree import TokenTree

PARENTS = st.integers(0, 24).flatmap(
    lambda size: st.tuples(*(st.integers(-1, node - 1) for node in range(size)))
)


@given(PARENTS)
def test_paths_and_depths_agree(parents):
    tree = TokenTree(parents)
    for node, depth in enumerate(tree.depths):
        path = tree.path(node)
        assert len(path) == depth
        assert path[-1] == node
        assert [parents[step] for step in path] == [-1, *path[:-1]]


@given(PARENTS)
def test_mask_rows_are_paths(parents):
    tree = TokenTree(parents)
    for node, row in enumerate(tree.ancestor_mask()):
        assert len(row) == len(parents)
        assert tuple(i for i, visible in enumerate(row) if visible) == tree.path(node)


@given(PARENTS)
def test_children_partition_the_nodes(parents):
    tree = TokenTree(parents)
    listed = [(node, child) for node in range(-1, len(parents)) for child in tree.children(node)]
    assert sorted(child for _, child in listed) == list(range(len(parents)))
    assert all(parents[child] == node for node, child in listed)
    assert all(
        list(tree.children(node)) == sorted(tree.children(node)) for node in range(-1, len(parents))
    )


@given(PARENTS)
def test_a_chain_has_no_siblings(parents):
    tree = TokenTree(parents)
    assert tree.is_chain == (len(set(parents)) == len(parents))
    assert tree.is_chain == (tree == TokenTree.chain(len(parents)))
