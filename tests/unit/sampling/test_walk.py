from __future__ import annotations

import pytest
import torch

from forerun.sampling.noise import exponential, position_key, race
from forerun.sampling.walk import (
    coupled_match_probs,
    edge_probs,
    expected_accepted,
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
    expected = race(probs, exponential(keys, 40))
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


def test_coupled_races_match_as_often_as_predicted() -> None:
    target = torch.tensor([0.5, 0.3, 0.2, 0.0])
    draft = torch.tensor([0.2, 0.2, 0.3, 0.3])
    num = 10_000
    clocks = exponential(torch.tensor([position_key(1, i) for i in range(num)]), 4)
    drafted = race(draft.expand(num, 4), clocks)
    matched = race(target.expand(num, 4), clocks) == drafted
    predicted = coupled_match_probs(target.expand(4, 4), draft.expand(4, 4), torch.arange(4))
    for token in range(4):
        share = matched[drafted == token].double().mean().item()
        assert share == pytest.approx(predicted[token].item(), abs=0.03)
    assert predicted[3] == 0


def test_a_draft_equal_to_the_target_always_matches() -> None:
    probs = torch.tensor([[0.7, 0.2, 0.1], [1.0, 0.0, 0.0]])
    assert coupled_match_probs(probs, probs, torch.tensor([1, 0])).tolist() == pytest.approx([1, 1])
