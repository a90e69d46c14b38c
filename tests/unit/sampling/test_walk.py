from __future__ import annotations

import pytest
import torch

from forerun.sampling.noise import position_key
from forerun.sampling.walk import (
    edge_probs,
    expected_accepted,
    expected_on_walk,
    race,
    target_keys,
    target_tokens,
    walk,
)
from forerun.theory.tree import TokenTree

TREE = TokenTree((-1, -1, 0, 0, 2))


@pytest.mark.parametrize(
    ("draws", "path", "final"),
    [
        ([9, 0, 0, 0, 0, 0], (), 9),
        ([5, 0, 8, 0, 0, 0], (1,), 8),
        ([4, 9, 0, 0, 0, 0], (0,), 9),
        ([4, 7, 0, 0, 3, 0], (0, 3), 3),
        ([4, 6, 0, 2, 0, 1], (0, 2, 4), 1),
    ],
)
def test_walk_follows_the_targets_tokens(
    draws: list[int], path: tuple[int, ...], final: int
) -> None:
    assert walk(TREE, [4, 5, 6, 7, 2], draws) == (path, final)


def test_walk_of_an_empty_tree_is_plain_decoding() -> None:
    assert walk(TokenTree(()), [], [3]) == ((), 3)


def test_of_equal_siblings_the_first_is_followed() -> None:
    assert walk(TokenTree((-1, -1, 0, 1)), [4, 4, 1, 2], [4, 1, 2, 0, 0]) == ((0, 2), 0)


def test_keys_are_those_of_the_drawn_positions() -> None:
    assert target_keys(5, 100, TREE) == [position_key(5, 100 + d) for d in (0, 1, 1, 2, 2, 3)]


def test_target_tokens_race_on_the_clocks_of_their_position() -> None:
    probs = torch.empty(6, 40).exponential_(generator=torch.Generator().manual_seed(0))
    probs /= probs.sum(-1, keepdim=True)
    keys = torch.tensor(target_keys(5, 100, TREE))
    expected = race(probs, keys)
    assert torch.equal(target_tokens(probs, keys), expected)
    alone = [target_tokens(probs[i : i + 1], keys[i : i + 1]) for i in range(6)]
    assert torch.equal(torch.cat(alone), expected)


def test_one_hot_rows_ignore_the_noise() -> None:
    probs = torch.eye(5)
    keys = torch.arange(5)
    assert target_tokens(probs, keys).tolist() == [0, 1, 2, 3, 4]


def test_expected_accepted_sums_path_probabilities() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [1.0, 0, 0], [0.25, 0.25, 0.5]])
    tree = TokenTree((-1, -1, 0))
    edges = edge_probs(tree, torch.tensor([0, 1, 1]), probs)
    assert edges.tolist() == pytest.approx([0.5, 0.3, 0.6])
    assert expected_accepted(tree, edges.tolist()) == pytest.approx(0.5 + 0.3 + 0.5 * 0.6)
    assert expected_accepted(TokenTree(()), []) == 0


def test_a_coupled_tree_expects_first_children_by_probability_and_others_as_they_came():
    tree = TokenTree((-1, -1, 0, 1, 1, 4))
    matches = [0.5, 9.0, 9.0, 0.25, 9.0, 0.125]  # 9: no first child of a node that was visited
    assert expected_on_walk(tree, (1, 4), matches) == 0.5 + 0.25 + 0.125 + 2
    assert expected_on_walk(tree, (), matches) == 0.5
    assert expected_on_walk(tree, (1, 4, 5), matches) == 0.5 + 0.25 + 0.125 + 2
