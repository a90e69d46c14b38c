"""A server's log-probabilities as a distribution: what is missing is never made up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests import tiny
from tests.unit.align.teachers.conftest import all_rows, caching, texts

from forerun.align.objectives import dense_probs
from forerun.align.samples import Sample
from forerun.align.teachers import known_shares, make_teacher
from forerun.errors import InvalidRequest
from forerun.sampling.config import SamplingParams
from forerun.sampling.processors import pack_params, target_probs

KNOWN = 6


def some_logits(num_rows: int = 40, vocab_size: int = 30) -> torch.Tensor:
    generator = torch.Generator().manual_seed(6)
    return torch.empty(num_rows, vocab_size).normal_(0, 2, generator=generator).double()


def known_and_true(params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares of the tokens a server names, and their whole deployed probabilities."""
    logits = some_logits()
    named = logits.log_softmax(-1).topk(KNOWN)
    packed = pack_params([params], rows=[0] * len(logits))
    true = target_probs(logits, packed).gather(-1, named.indices)
    return known_shares(named.values, params), true


def test_at_temperature_1_shares_are_true():
    shares, true = known_and_true(SamplingParams())
    torch.testing.assert_close(shares, true, atol=1e-12, rtol=1e-9)
    assert (shares.sum(-1) < 0.999).any()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=KNOWN),
        SamplingParams(top_k=2, temperature=0.5),
        SamplingParams(top_k=4, temperature=2.0, top_p=0.8),
        SamplingParams(min_p=0.5, temperature=0.7),
        SamplingParams(min_p=0.45, top_k=3, top_p=0.6),
        SamplingParams(temperature=0),
    ],
)
def test_what_truncation_drops_need_not_be_known(params):
    shares, true = known_and_true(params)
    covered = true.sum(-1) > 1 - 1e-9
    assert covered.float().mean() > 0.7
    torch.testing.assert_close(shares[covered], true[covered], atol=1e-9, rtol=1e-6)


def test_a_nucleus_that_is_known_is_exact():
    shares, true = known_and_true(SamplingParams(top_p=0.6))
    covered = true.sum(-1) > 1 - 1e-9
    assert 0.3 < covered.float().mean() < 1
    torch.testing.assert_close(shares[covered], true[covered], atol=1e-9, rtol=1e-6)
    assert (shares[~covered].sum(-1) < 1).all()


def test_shares_are_too_small_below_temperature_1_and_too_large_above():
    shares, true = known_and_true(SamplingParams(temperature=0.8))
    assert (shares <= true + 1e-12).all()
    shares, true = known_and_true(SamplingParams(temperature=1.3))
    assert (shares >= true - 1e-12).all()
    assert (shares.sum(-1) <= 1 + 1e-12).all()


def test_rows_of_which_fewer_tokens_are_known_are_their_own():
    """Padding changes nothing."""
    logprobs = some_logits().log_softmax(-1).topk(3).values
    wide = torch.nn.functional.pad(logprobs, (0, 2), value=-torch.inf)
    for params in (
        SamplingParams(),
        SamplingParams(min_p=0.01),
        SamplingParams(top_k=3),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.7, temperature=0.5),
    ):
        shares = known_shares(wide, params)
        torch.testing.assert_close(shares[:, :3], known_shares(logprobs, params))
        assert not shares[:, 3:].any()


def with_logprobs(samples: list[Sample]) -> list[Sample]:
    """As a server gives them: a token more or less, and not in order."""
    found = []
    for index, sample in enumerate(samples):
        top = tuple(
            ((row % 5, -2.0), (20 + index, -0.5)) + (((9, -1.5),) if row % 2 else ())
            for row in range(sample.num_learned)
        )
        found.append(replace(sample, top_logprobs=top))
    return found


def test_rows_are_those_of_their_samples(on_disk, caplog):
    packing, batch = all_rows(with_logprobs(texts()))
    teacher = make_teacher(caching("top-k"), on_disk.source, 100)
    teacher.prepare(packing.samples)
    assert "are truncated to the tokens that the server named" in caplog.text
    rows = teacher.rows(batch)
    assert len(rows) == packing.num_learned
    probs = dense_probs(rows.distribution(slice(0, len(rows))), tiny.VOCAB_SIZE)
    learned = batch.predicts
    for row, (owner, place) in enumerate(
        zip(batch.samples[learned].tolist(), batch.positions[learned].tolist(), strict=True)
    ):
        sample = packing.samples[owner]
        places = [i - 1 for start, end in sample.spans for i in range(start, end)]
        given = sample.top_logprobs[places.index(place)]
        expected = torch.zeros(tiny.VOCAB_SIZE)
        for token, value in given:
            expected[token] = value
        named = expected != 0
        torch.testing.assert_close(probs[row][named], expected[named].exp())
        assert not probs[row][~named].any()


def test_a_greedy_distribution_is_known_whole(on_disk, caplog):
    source = on_disk.with_(sampling=SamplingParams(temperature=0))
    teacher = make_teacher(caching("top-k"), source, 100)
    packing, batch = all_rows(with_logprobs(texts(2)))
    teacher.prepare(packing.samples)
    assert not caplog.records
    distribution = teacher.rows(batch).distribution(slice(0, 3))
    best = distribution.ids.gather(1, distribution.shares.argmax(-1, keepdim=True))
    assert set(best.flatten().tolist()) <= {20, 21}
    assert distribution.shares.sum(-1).tolist() == [1.0] * 3


@pytest.mark.parametrize(
    "spoil", [lambda top: None, lambda top: top[:-1], lambda top: ((), *top[1:])]
)
def test_a_response_without_them_is_named(spoil, on_disk):
    samples = with_logprobs(texts(3))
    samples[1] = replace(samples[1], top_logprobs=spoil(samples[1].top_logprobs))
    teacher = make_teacher(caching("top-k"), on_disk.source, 100)
    with pytest.raises(InvalidRequest, match="prompt 0000000000000001 has no log-probabilities"):
        teacher.prepare(samples)


def test_a_token_exactly_at_min_p_is_kept() -> None:
    logprobs = torch.tensor([[0.5, 0.25, 0.125]], dtype=torch.float64).log()
    found = known_shares(logprobs, SamplingParams(min_p=0.5))
    torch.testing.assert_close(found, torch.tensor([[2 / 3, 1 / 3, 0.0]], dtype=torch.float64))
