"""Trees of the suffix drafter: several continuations, shorter suffixes, and what they cost."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.drafters.test_suffix import FREE, asked, matching

from forerun.control.base import Plan, Tree
from forerun.drafters.base import Pause
from forerun.drafters.config import SuffixConfig
from forerun.drafters.suffix import SuffixDrafter, branches_on, most_valuable
from forerun.drafters.tree_growth import build_tree
from forerun.sampling.config import Choice

SHAPE = Tree(num_nodes=6, depth=3, width=3)


def test_continuations_come_by_their_counts():
    text = [1, 2, 5, 1, 2, 5, 1, 2, 6, 1, 2, 7, 1, 2]
    built = branches_on(matching(text), Tree(num_nodes=3, depth=1, width=3), FREE)
    assert built.tokens == (5, 7, 6) or built.tokens == (5, 6, 7)
    assert built.log_probs[0] > built.log_probs[1]


def test_shorter_suffixes_fill_what_the_longest_leaves_over():
    """The end 1 2 was followed by 5 alone, the end 2 also by 8."""
    text = [1, 2, 5, 0, 2, 8, 0, 9, 2, 8, 4, 1, 2]
    built = branches_on(matching(text), Tree(num_nodes=2, depth=1, width=2), FREE)
    assert set(built.tokens) == {5, 8}


@given(st.lists(st.integers(0, 3), max_size=40))
def test_trees_are_copies_within_their_shape(text):
    built = branches_on(matching(text), SHAPE, FREE)
    if built is None:
        return
    assert len(built.tokens) <= SHAPE.num_nodes
    assert max(built.tree.depths) <= SHAPE.depth
    whole = "".join(map(str, text))
    for path, log_prob in zip(built.paths, built.log_probs, strict=True):
        assert log_prob <= 1e-12
        # Every path continues at least the last token as the text did before.
        assert str(text[-1]) + str(path[0]) in whole
        assert "".join(map(str, path)) in whole
    for node in range(-1, len(built.tokens)):
        assert len(built.tree.children(node)) <= SHAPE.width


def test_the_first_nodes_that_pay_are_kept():
    probs = iter(([0.5, 0.4], [0.9, 0.1], [0.2, 0.2], [0.1, 0.1], [0.1, 0.1]))

    def expand(path):
        return [1, 2], [math.log(p) for p in next(probs)]

    built = build_tree(expand, Tree(num_nodes=6, depth=3, width=2))
    gains = sorted(map(math.exp, built.log_probs), reverse=True)
    config = SuffixConfig(step_cost=0.1, row_cost=0.2)
    values = [(1 + sum(gains[:n])) / (1.1 + 0.2 * n) if n else 1.0 for n in range(len(gains) + 1)]
    assert most_valuable(built, config) == max(range(len(values)), key=values.__getitem__)
    assert most_valuable(built, SuffixConfig(step_cost=9.0)) == 0


def test_a_plan_for_a_tree_gets_one_and_a_chain_stays_a_chain():
    drafter = SuffixDrafter(FREE)
    text = [1, 2, 5, 1, 2, 5, 1, 2, 6, 1, 2, 7, 1, 2]
    (tree,) = drafter.propose([asked(text)], [Plan(method="suffix", shape=SHAPE)])
    assert tree.choice is Choice.DETERMINISTIC
    assert not tree.tree.is_chain
    (chain,) = drafter.propose([asked(text)], [Plan.chain("suffix", 6)])
    assert chain.tree.is_chain
    narrow = Tree(num_nodes=6, depth=3, width=1)
    (cut,) = drafter.propose([asked(text)], [Plan(method="suffix", shape=narrow)])
    assert cut.tokens.tolist() == chain.tokens.tolist()[:3]


@pytest.mark.parametrize("config", [SuffixConfig(step_cost=9.0), SuffixConfig(tokens_per_match=0)])
def test_where_no_tree_pays_it_pauses(config):
    text = [1, 2, 5, 1, 2, 5, 1, 2]
    plan = Plan(method="suffix", shape=SHAPE)
    (answer,) = SuffixDrafter(config).propose([asked(text)], [plan])
    assert isinstance(answer, Pause)
