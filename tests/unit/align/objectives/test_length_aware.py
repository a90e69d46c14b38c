from __future__ import annotations

import pytest
import torch
from tests.unit.align.objectives.distributions import dense_distribution, normal

from forerun.align.config import ObjectiveConfig
from forerun.align.draft import length_weights
from forerun.align.objectives import make_objective

K = 4


def places(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts of so many learned rows each, one after another."""
    samples = torch.cat([torch.full((n,), index) for index, n in enumerate(lengths)])
    return samples, torch.cat([torch.arange(n) for n in lengths])


def expected_length(alphas: torch.Tensor) -> torch.Tensor:
    """Of one window: the sum of its running products."""
    return alphas.cumprod(0).sum()


def test_a_window_by_hand() -> None:
    samples, positions = places(3)
    # Window of the first row: .5 + .5*.4 = .7 accepted, .2 of it through the second;
    # of the second: .4 + .4*.9 = .76, .36 of it through the third; of the third: all its own.
    found = length_weights(torch.tensor([0.5, 0.4, 0.9]), samples, positions, 2)
    assert found.tolist() == pytest.approx([1, 1 + 0.2 / 0.7, 1 + 0.36 / 0.76])


def test_certain_acceptance_and_none() -> None:
    samples, positions = places(20)
    certain = length_weights(torch.ones(20), samples, positions, K)
    torch.testing.assert_close(certain[K - 1 : -K], torch.full((20 - 2 * K + 1,), (K + 1) / 2))
    none = length_weights(torch.zeros(20), samples, positions, K)
    torch.testing.assert_close(none, torch.ones(20), rtol=1e-5, atol=1e-5)


def test_with_log_acceptance_it_is_the_gradient_of_log_expected_length() -> None:
    lengths, vocab = (9, 2, 1), 11
    distribution = dense_distribution(sum(lengths), vocab)
    logits = normal(sum(lengths), vocab, seed=0).requires_grad_()
    labels = torch.zeros(sum(lengths), dtype=torch.int64)
    losses = make_objective(ObjectiveConfig(objective="nla"), 1.0).losses(
        logits, distribution, labels
    )
    alphas = (-losses).exp()
    total = torch.zeros((), dtype=torch.float64)
    for document in alphas.split(lengths):
        for start in range(len(document)):
            total = total - expected_length(document[start : start + K]).log()
    (expected,) = torch.autograd.grad(total, logits, retain_graph=True)
    weights = length_weights(alphas.detach(), *places(*lengths), K)
    (found,) = torch.autograd.grad(losses @ weights, logits)
    torch.testing.assert_close(found, expected)


def test_windows_end_with_their_text_and_where_positions_skip() -> None:
    alphas = normal(10, seed=0).sigmoid()
    together = length_weights(alphas, *places(6, 4), K)
    apart = [length_weights(part, *places(len(part)), K) for part in alphas.split((6, 4))]
    torch.testing.assert_close(together, torch.cat(apart))
    skipping = torch.tensor([*range(6), *range(16, 20)])
    torch.testing.assert_close(
        length_weights(alphas, torch.zeros(10, dtype=torch.int64), skipping, K), torch.cat(apart)
    )


def test_windows_longer_than_all_rows() -> None:
    alphas = torch.tensor([0.5, 0.5])
    found = length_weights(alphas, *places(2), 8)
    assert found.tolist() == pytest.approx([1, 1 + 0.25 / 0.75])


def test_a_text_whose_positions_go_on_from_the_one_before_is_another_text() -> None:
    alphas = normal(7, seed=1).sigmoid()
    samples = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    found = length_weights(alphas, samples, torch.arange(7), K)
    apart = [length_weights(part, *places(len(part)), K) for part in alphas.split((3, 4))]
    torch.testing.assert_close(found, torch.cat(apart))
