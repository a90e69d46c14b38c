from __future__ import annotations

import math

import pytest
import torch

from forerun.sampling import kernels
from forerun.sampling.kernels import raw_logprobs


def test_logprobs_of_chosen_and_best_tokens() -> None:
    logits = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.25, 0.25]]).log() + 7
    found = raw_logprobs(logits.bfloat16().float(), torch.tensor([2, 0]), 2)
    torch.testing.assert_close(
        found.token_logprobs, torch.tensor([0.3, 0.5]).log(), rtol=0.05, atol=0.02
    )
    assert found.top_tokens[0].tolist() == [1, 2]
    assert found.top_tokens[1, 0].item() == 0
    assert found.top_logprobs[0, 0].item() == pytest.approx(math.log(0.6), abs=0.02)


def test_more_than_the_vocabulary_and_none_at_all() -> None:
    logits = torch.zeros(1, 3)
    assert raw_logprobs(logits, torch.tensor([1]), 20).top_logprobs.shape == (1, 3)
    assert raw_logprobs(logits, torch.tensor([1]), 0).top_tokens.shape == (1, 0)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.arange(12.0).reshape(4, 3).sin()
    tokens = torch.tensor([0, 1, 2, 0])
    whole = raw_logprobs(logits, tokens, 2)
    monkeypatch.setattr(kernels, "row_chunks", lambda num, width: [slice(0, 3), slice(3, num)])
    pieces = raw_logprobs(logits, tokens, 2)
    assert torch.equal(pieces.token_logprobs, whole.token_logprobs)
    assert torch.equal(pieces.top_tokens, whole.top_tokens)
    assert torch.equal(pieces.top_logprobs, whole.top_logprobs)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    logits = torch.empty(9, 301).normal_(0, 4, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(9) * 30
    together = raw_logprobs(logits, tokens, 5)
    for row in range(9):
        alone = raw_logprobs(logits[row : row + 1], tokens[row : row + 1], 5)
        assert torch.equal(together.token_logprobs[row : row + 1], alone.token_logprobs)
        assert torch.equal(together.top_tokens[row : row + 1], alone.top_tokens)
        assert torch.equal(together.top_logprobs[row : row + 1], alone.top_logprobs)
