"""Rates rise in a line and fall by a cosine; only matrices decay; Muon orthogonalises momentum."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tests import training
from torch import nn

from forerun.align.trainer import (
    MUON_RATE,
    WEIGHT_DECAY,
    learning_rate_at,
    make_optimiser,
    orthogonalise,
)


def test_the_learning_rate_rises_and_falls_to_a_tenth() -> None:
    settings = training.config(num_steps=101, warmup_share=0.1, learning_rate=1.0)
    rates = [learning_rate_at(step, settings) for step in range(101)]
    assert rates[:11] == pytest.approx([(step + 1) / 11 for step in range(11)])
    assert rates[10] == rates[11] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.1)
    middle = 11 + (100 - 11) / 2
    assert (rates[int(middle)] + rates[int(middle) + 1]) / 2 == pytest.approx(0.55, abs=1e-3)
    assert all(later < earlier for earlier, later in pairwise(rates[11:]))


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_short_runs_have_a_rate_too(num_steps: int) -> None:
    settings = training.config(num_steps=num_steps, warmup_share=0.5, learning_rate=1.0)
    assert all(0 < learning_rate_at(step, settings) <= 1 for step in range(num_steps + 1))


def test_no_warm_up() -> None:
    assert learning_rate_at(0, training.config(warmup_share=0.0)) == pytest.approx(2e-2)


def test_only_matrices_decay() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    module[0].bias.requires_grad_(False)
    optimiser = make_optimiser(module, 0.1)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    after = dict(module.named_parameters())
    torch.testing.assert_close(after["0.weight"], before["0.weight"] * (1 - 0.1 * WEIGHT_DECAY))
    for name in ("0.bias", "1.weight", "1.bias"):
        assert torch.equal(after[name], before[name])


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalise(matrix)
    assert found.shape == shape
    values = torch.linalg.svdvals(found)
    assert float(values.min()) > 0.3 and float(values.max()) < 1.3
    rows, _, columns = torch.linalg.svd(matrix, full_matrices=False)
    assert float((found * (rows @ columns)).sum() / found.norm() / (rows @ columns).norm()) > 0.9


def test_muon_moves_its_matrices_by_a_fixed_size_and_leaves_the_others_to_adamw() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 16))
    others = [p for p in module.parameters() if p is not module[0].weight]
    plain = torch.optim.AdamW(
        [p.detach().clone().requires_grad_() for p in others], lr=0.01, betas=(0.9, 0.95)
    )
    optimiser = make_optimiser(module, 0.01, [module[0].weight])
    before = module[0].weight.detach().clone()
    for parameter in module.parameters():
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    for theirs, ours in zip(plain.param_groups[0]["params"], others, strict=True):
        theirs.grad = ours.grad.clone()
    optimiser.step()
    plain.step()
    moved = module[0].weight.detach() - before * (1 - MUON_RATE * 0.01 * WEIGHT_DECAY)
    size = moved.square().mean().sqrt().item()
    assert size == pytest.approx(0.2 * MUON_RATE * 0.01, rel=0.3)
    torch.testing.assert_close(others[1], plain.param_groups[0]["params"][1] / (1 - 0.01 * 0.01))
    assert len(optimiser.param_groups) == 3


def test_a_state_with_muon_is_restored_by_torch() -> None:
    module = nn.Linear(8, 4)
    optimiser = make_optimiser(module, 0.01, [module.weight])
    module(torch.ones(1, 8)).sum().backward()
    optimiser.step()
    again = make_optimiser(module, 0.01, [module.weight])
    again.load_state_dict(optimiser.state_dict())
    found, expected = (each.state[module.weight]["momentum"] for each in (again, optimiser))
    assert torch.equal(found, expected)
