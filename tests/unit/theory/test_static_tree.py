"""The dynamic programme against all trees of a size."""

from __future__ import annotations

import pytest
from tests.naive import expected_static

from forerun.doctor.exact.trees import all_trees
from forerun.theory.tree import static_tree

RANKS = ((0.6, 0.2, 0.1), (0.35, 0.3, 0.25), (0.9, 0.05, 0.01), (0.5, 0.5, 0.0))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("num_nodes", "depth", "width"), [(5, 3, 3), (6, 2, 3), (4, 4, 2), (3, 1, 3)]
)
def test_no_tree_of_the_size_is_better(ranks, num_nodes, depth, width):
    found = static_tree(ranks, num_nodes, depth, width)
    best = max(expected_static(tree, ranks) for tree in all_trees(num_nodes, depth, width))
    assert expected_static(found, ranks) == pytest.approx(best)
    assert len(found.parents) <= num_nodes
    assert max(found.depths) <= depth
    assert max(len(found.children(node)) for node in range(-1, len(found.parents))) <= width


def test_certain_acceptance_gives_a_chain():
    assert static_tree((1.0,), 5, 5, 3).is_chain


def test_nodes_are_numbered_depth_first():
    assert static_tree((0.6, 0.3), 6, 2, 2).parents == (-1, 0, 0, -1, 3, 3)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ValueError, match="at least 1"):
        static_tree((0.5,), *sizes)


def test_acceptances_above_one_are_refused():
    with pytest.raises(ValueError, match="add up to at most"):
        static_tree((0.8, 0.4), 3, 2, 2)
