"""Up in a line, down half a cosine; matrices decay and nothing else does."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tests import training
from torch import nn

from forerun.align.trainer import WEIGHT_DECAY, learning_rate_at, make_optimiser


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
    optimiser = make_optimiser(module, training.config(learning_rate=0.1))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    after = dict(module.named_parameters())
    torch.testing.assert_close(after["0.weight"], before["0.weight"] * (1 - 0.1 * WEIGHT_DECAY))
    for name in ("0.bias", "1.weight", "1.bias"):
        assert torch.equal(after[name], before[name])
