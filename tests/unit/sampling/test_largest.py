"""The argmax of every row, however wide."""

from __future__ import annotations

import pytest
import torch

from forerun.sampling.kernels import largest


@pytest.mark.parametrize("vocab_size", [1, 3, 61, 64, 256, 300, 1000, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_argmax_and_its_score(vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    scores = torch.empty(9, vocab_size).normal_(generator=generator).to(dtype)
    best, token = largest(scores)
    assert torch.equal(token, scores.argmax(-1))
    assert torch.equal(best, scores.amax(-1))


def test_of_equals_the_lowest_id() -> None:
    scores = torch.zeros(3, 1024)
    scores[1, [300, 301, 900]] = 1
    scores[2, [255, 256]] = 1
    assert largest(scores)[1].tolist() == [0, 300, 255]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_is_found(value: float) -> None:
    scores = torch.ones(2, 1024)
    scores[1, 700] = value
    best, token = largest(scores)
    assert best.isfinite().tolist() == [True, False]
    assert token[1] == 700


def test_a_row_without_any_possible_token_is_not_finite() -> None:
    assert largest(torch.full((1, 512), -torch.inf))[0].tolist() == [-torch.inf]


def test_columns_cut_off_do_not_count() -> None:
    scores = torch.arange(12.0).view(2, 6)
    assert largest(scores[:, :4])[1].tolist() == [3, 3]


def test_no_rows() -> None:
    assert largest(torch.empty(0, 512))[1].shape == (0,)
