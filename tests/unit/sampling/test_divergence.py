from __future__ import annotations

import math

import pytest
import torch

from forerun.sampling.divergence import acceptance_probability, js, kl, total_variation

TARGET = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5]]).double()
DRAFT = torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.5, 0.5], [0.2, 0.3, 0.5]]).double()


def test_values() -> None:
    assert total_variation(TARGET, DRAFT).tolist() == pytest.approx([0.25, 1.0, 0.0])
    assert acceptance_probability(TARGET, DRAFT).tolist() == pytest.approx([0.75, 0.0, 1.0])
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert kl(TARGET, DRAFT).tolist() == pytest.approx([expected, math.inf, 0.0])
    assert js(TARGET, DRAFT)[1:].tolist() == pytest.approx([math.log(2), 0.0])


def test_acceptance_and_distance_sum_to_one() -> None:
    torch.testing.assert_close(
        acceptance_probability(TARGET, DRAFT), 1 - total_variation(TARGET, DRAFT)
    )


def test_the_middle_law_is_between() -> None:
    assert 0 < js(TARGET, DRAFT)[0] < math.log(2)
    torch.testing.assert_close(js(TARGET, DRAFT), js(DRAFT, TARGET))
