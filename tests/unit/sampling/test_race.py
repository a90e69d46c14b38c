"""Races: whatever they share, each distribution draws from itself."""

from __future__ import annotations

import math

import pytest
import torch

from forerun.sampling import walk as racing
from forerun.sampling.noise import exponential, position_key
from forerun.sampling.walk import coupled_match_probs, race

NUM_DRAWS = 20_000


def keys(num: int, request: int = 7) -> torch.Tensor:
    return torch.tensor([position_key(request, n) for n in range(num)])


def random_probs(vocab_size: int, seed: int, scale: float = 1.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.empty(vocab_size).normal_(0, scale, generator=generator).softmax(-1)
    probs[seed % vocab_size] = 0
    return probs / probs.sum()


def draws(probs: torch.Tensor, request: int = 7) -> torch.Tensor:
    return race(probs.expand(NUM_DRAWS, -1), keys(NUM_DRAWS, request))


def deviation(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Chi-square in units of its standard deviation from its mean."""
    possible = probs > 0
    expected = probs[possible] * counts.sum()
    freedom = int(possible.sum()) - 1
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("vocab_size", [2, 5, 8, 9, 24, 61])
def test_draws_follow_the_probabilities(vocab_size: int) -> None:
    probs = random_probs(vocab_size, 1)
    counts = torch.bincount(draws(probs), minlength=vocab_size).double()
    assert counts[1] == 0
    if vocab_size > 2:
        assert abs(deviation(counts, probs)) < 4


def test_group_and_member_race_on_clocks_of_their_own() -> None:
    """With shared clocks the members of a group that won early would not be fair."""
    probs = torch.full((24,), 1 / 24)
    tokens = draws(probs)
    for group in range(3):
        members = tokens[tokens % 3 == group] // 3
        counts = torch.bincount(members, minlength=8).double()
        assert abs(deviation(counts, torch.full((8,), 1 / 8))) < 4


def test_small_vocabularies_race_token_by_token() -> None:
    probs = random_probs(8, 3).expand(50, 8)
    clocks = exponential(keys(50), 9)[:, 1:]
    assert torch.equal(race(probs, keys(50)), (clocks / probs).argmin(-1))


def test_a_draw_depends_on_its_row_and_key_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    probs = torch.stack([random_probs(1000, seed) for seed in range(9)])
    together = race(probs, keys(9))
    alone = [race(probs[i : i + 1], keys(9)[i : i + 1]) for i in range(9)]
    assert torch.equal(torch.cat(alone), together)
    monkeypatch.setattr(racing, "row_chunks", lambda *_: [slice(0, 4), slice(4, 9)])
    assert torch.equal(race(probs, keys(9)), together)


def test_one_hot_rows_ignore_the_noise() -> None:
    assert race(torch.eye(21), torch.arange(21)).tolist() == list(range(21))


def test_tiny_probabilities_cannot_overflow_a_race() -> None:
    probs = torch.tensor([[1e-45, 1.0, 0.0]]).expand(200, 3)
    assert set(race(probs, keys(200)).tolist()) == {1}


def test_a_row_without_a_distribution_yields_an_id_nevertheless() -> None:
    (token,) = race(torch.full((1, 9), torch.nan), keys(1)).tolist()
    assert 0 <= token < 9


@pytest.mark.parametrize("vocab_size", [4, 20])
def test_races_match_as_often_as_predicted(vocab_size: int) -> None:
    target, draft = random_probs(vocab_size, 1), random_probs(vocab_size, 2)
    drafted, drawn = draws(draft), draws(target)
    rows = (target.expand(vocab_size, -1), draft.expand(vocab_size, -1))
    predicted = coupled_match_probs(*rows, torch.arange(vocab_size))
    for token in range(vocab_size):
        chosen = drafted == token
        if chosen.sum() > 300:
            share = (drawn == drafted)[chosen].double().mean().item()
            error = 3.5 * math.sqrt(0.25 / int(chosen.sum()))
            assert share == pytest.approx(predicted[token].item(), abs=error)
    assert predicted[1] == 0
    by_chance = (target * draft).sum()
    assert (drawn == drafted).double().mean() > 1.2 * by_chance


def test_a_draft_equal_to_the_target_always_matches() -> None:
    probs = torch.stack([random_probs(20, 4), torch.eye(20)[7]])
    matches = coupled_match_probs(probs, probs, torch.tensor([1, 7]))
    assert matches.tolist() == pytest.approx([1, 1])
