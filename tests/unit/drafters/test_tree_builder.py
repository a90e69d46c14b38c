"""The builder against an exhaustive choice of the most probable paths."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.control.base import Tree
from forerun.drafters.tree_growth import build_tree

WIDTH, DEPTH = 3, 3


def random_candidates(seed: int):
    """A function that gives every path random candidates, the same at every call."""

    def expand(path):
        rng = random.Random(f"{seed}{path}")
        probs = sorted((rng.choice((0.1, 0.3, 0.3, 0.6, 1.0)) for _ in range(WIDTH)), reverse=True)
        total = max(1.0, sum(probs))
        return rng.sample(range(50), WIDTH), [math.log(p / total) for p in probs]

    return expand


def all_paths(expand):
    """Every path of the full tree with its log-probability."""
    level, found = {(): 0.0}, {}
    for _ in range(DEPTH):
        following = {}
        for path, log_prob in level.items():
            for token, value in zip(*expand(path), strict=True):
                following[*path, token] = log_prob + value
        found |= following
        level = following
    return found


@given(seed=st.integers(0, 10_000), num_nodes=st.integers(1, 30))
def test_the_tree_holds_the_most_probable_paths(seed, num_nodes):
    expand = random_candidates(seed)
    built = build_tree(expand, Tree(num_nodes=num_nodes, depth=DEPTH, width=WIDTH))
    every = all_paths(expand)
    assert len(set(built.paths)) == num_nodes
    assert sorted(built.log_probs) == pytest.approx(sorted(every.values())[-num_nodes:])
    for node, path in enumerate(built.paths):
        assert built.log_probs[node] == every[path]
        assert built.tokens[node] == path[-1]
        assert [built.tokens[above] for above in built.tree.path(node)] == list(path)


@given(seed=st.integers(0, 10_000), num_nodes=st.integers(1, 30), width=st.integers(1, WIDTH))
def test_siblings_are_ordered_by_rank_and_nodes_depth_first(seed, num_nodes, width):
    expand = random_candidates(seed)
    built = build_tree(expand, Tree(num_nodes=num_nodes, depth=DEPTH, width=width))
    tree = built.tree
    order = []

    def visit(node):
        for child in tree.children(node):
            order.append(child)
            visit(child)

    visit(-1)
    assert order == list(range(len(tree.parents)))
    for node in range(-1, len(tree.parents)):
        children = tree.children(node)
        assert len(children) <= width
        tokens = expand(built.paths[node] if node >= 0 else ())[0]
        assert [built.tokens[child] for child in children] == list(tokens[: len(children)])


def test_equally_probable_nodes_enter_after_their_parents():
    built = build_tree(lambda path: ([7, 8], [0.0, 0.0]), Tree(num_nodes=3, depth=9, width=2))
    assert built.tree.parents[0] == -1
    assert build_tree(lambda path: ([7], [0.0]), Tree(num_nodes=4, depth=9, width=2)).tree.is_chain


def test_impossible_candidates_and_empty_rows_are_left_out():
    def expand(path):
        return {(): ([3, 4], [0.0, -math.inf]), (3,): ([], [])}.get(path)

    built = build_tree(expand, Tree(num_nodes=9, depth=3, width=2))
    assert built.tokens == (3,)
    assert build_tree(lambda path: None, Tree(num_nodes=9, depth=3, width=2)).tokens == ()


def test_candidates_are_asked_for_once_and_only_where_needed():
    asked = []

    def expand(path):
        asked.append(path)
        return random_candidates(3)(path)

    built = build_tree(expand, Tree(num_nodes=8, depth=2, width=3))
    assert len(asked) == len(set(asked))
    assert set(asked) == {(), *(path for path in built.paths if len(path) < 2)}


@pytest.mark.usefixtures("unchecked")
def test_sixty_four_nodes_take_few_calls():
    """About 75 microseconds; calls are counted, because times depend on what the machine does."""
    rng = random.Random(0)
    rows = []
    for _ in range(8):
        shares = sorted((rng.random() ** 3 for _ in range(8)), reverse=True)
        log_probs = [math.log(share / sum(shares)) for share in shares]
        rows.append((rng.sample(range(50_000), 8), log_probs))
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        built = build_tree(lambda path: rows[len(path)], Tree(num_nodes=64, depth=8, width=8))
    finally:
        sys.setprofile(None)
    assert len(built.tokens) == 64
    assert calls["call"] + calls["c_call"] < 64 * 20
