"""Nodes of a batch: the R best, against every way to give out R."""

from __future__ import annotations

from itertools import accumulate, product
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.naive import expected_static

from forerun.theory.tree import ranked_nodes, static_tree, tree_survival

SURVIVAL = st.lists(
    st.lists(st.floats(0.0, 1.0), max_size=4).map(lambda row: list(accumulate(row, mul))),
    min_size=1,
    max_size=3,
)


def worth(survival: list[list[float]], depths: tuple[int, ...]) -> float:
    return sum(sum(curve[:depth]) for curve, depth in zip(survival, depths, strict=True))


def depths_within(survival: list[list[float]], budget: int) -> list[int]:
    chosen = [index for _, _, index in ranked_nodes(survival)[:budget]]
    return [chosen.count(index) for index in range(len(survival))]


@given(survival=SURVIVAL, budget=st.integers(0, 13))
def test_no_other_way_to_spend_the_budget_is_worth_more(survival, budget):
    depths = depths_within(survival, budget)
    assert sum(depths) == min(budget, sum(map(len, survival)))
    ways = product(*(range(len(curve) + 1) for curve in survival))
    best = max(worth(survival, way) for way in ways if sum(way) <= budget)
    assert worth(survival, tuple(depths)) == pytest.approx(best)


@given(survival=SURVIVAL)
def test_no_node_comes_before_its_parent(survival):
    reached = [0] * len(survival)
    for _, depth, index in ranked_nodes(survival):
        assert depth == reached[index]
        reached[index] += 1


def test_of_equals_the_shallowest_comes_first():
    assert depths_within([[0.5, 0.5], [0.5]], 2) == [1, 1]


def test_a_batch_of_unequal_requests_gains_by_not_being_treated_alike():
    """16 requests, half of them hard: over an eighth more accepted tokens from the same rows."""
    alphas = [0.2, 0.4, 0.7, 0.9] * 4
    survival = [[alpha ** (depth + 1) for depth in range(8)] for alpha in alphas]
    equal = worth(survival, (3,) * 16)
    shared = worth(survival, tuple(depths_within(survival, 3 * 16)))
    assert shared > 1.125 * equal


@pytest.mark.parametrize("ranks", [(0.6, 0.2, 0.1), (0.35, 0.3, 0.25)])
@pytest.mark.parametrize(("depth", "num_nodes"), [(3, 5), (2, 8), (1, 3)])
def test_nodes_of_a_tree_are_those_of_the_best_static_one(ranks, depth, num_nodes):
    later = [ranks[1] / (1 - ranks[0]), ranks[2] / (1 - ranks[0] - ranks[1])]
    found = tree_survival([ranks[0]] * depth, later, depth=depth, num_nodes=num_nodes)
    assert found == sorted(found, reverse=True)
    best = static_tree(ranks, num_nodes, depth, 3)
    assert len(found) == len(best.parents)
    assert sum(found) == pytest.approx(expected_static(best, ranks))


def test_a_tree_without_further_children_is_a_chain():
    assert tree_survival([0.5, 0.4], [], depth=2, num_nodes=9) == pytest.approx([0.5, 0.2])
    assert tree_survival([0.5], [0.5], depth=0, num_nodes=9) == []
