"""Drawn ids: unbiased, near the distribution they were drawn from, and reproducible."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests import tiny
from tests.unit.align.teachers.conftest import all_rows, caching, expected_logits, objective, texts

from forerun.align.objectives import SparseDistribution, dense_probs
from forerun.align.teachers import draw_ids, make_teacher
from forerun.errors import InvalidRequest, NumericalError
from forerun.sampling.config import SamplingParams

VOCAB_SIZE = 11


def some_probs(num_rows: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    logits = torch.empty(num_rows, VOCAB_SIZE).normal_(0, 2, generator=generator)
    logits[:, 3] = -torch.inf
    return logits.softmax(-1)


def counts_of(drawn: torch.Tensor) -> torch.Tensor:
    empty = torch.zeros(len(drawn), VOCAB_SIZE, dtype=torch.float64)
    return empty.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))


@pytest.mark.parametrize("num_ids", [1, 2, 7, 64])
def test_expected_shares_are_the_distribution(num_ids):
    """Offsets on a fine grid stand for all of them: an id's draws are off by one step at most."""
    probs, num_offsets = some_probs(), 500
    total = torch.zeros(len(probs), VOCAB_SIZE, dtype=torch.float64)
    for step in range(num_offsets):
        offsets = torch.full((len(probs),), (step + 0.5) / num_offsets, dtype=torch.float64)
        total += counts_of(draw_ids(probs, offsets, num_ids))
    shares = total / total.sum(-1, keepdim=True)
    assert (shares - probs).abs().max() <= 1 / (num_ids * num_offsets) + 1e-6


@pytest.mark.parametrize("num_ids", [1, 5, 64])
def test_no_id_is_drawn_more_than_once_too_often(num_ids):
    probs = some_probs()
    for offset in (0.0, 0.3, 1 - 2.0**-53):
        drawn = draw_ids(probs, torch.full((len(probs),), offset, dtype=torch.float64), num_ids)
        off = counts_of(drawn) - num_ids * probs
        assert off.abs().max() < 1 + 1e-6
        assert not (drawn == 3).any()
        assert (drawn.diff(dim=-1) >= 0).all()


def test_the_last_token_may_be_impossible():
    probs = torch.tensor([[0.5, 0.5, 0.0]])
    for num_ids in (1, 2, 3, 64):
        drawn = draw_ids(probs, torch.tensor([1 - 2.0**-53], dtype=torch.float64), num_ids)
        assert drawn.max() == 1


def test_the_gradient_of_a_linear_objective_is_unbiased():
    """Averaged over offsets, the gradient from drawn ids is that from the whole distribution."""
    probs, num_offsets = some_probs(), 400
    generator = torch.Generator().manual_seed(5)
    logits = torch.empty(len(probs), VOCAB_SIZE).normal_(generator=generator).requires_grad_()
    labels = torch.zeros(len(probs), dtype=torch.int64)
    total = torch.zeros_like(logits)
    for step in range(num_offsets):
        offsets = torch.full((len(probs),), (step + 0.5) / num_offsets, dtype=torch.float64)
        drawn = draw_ids(probs, offsets, 3)
        distribution = SparseDistribution(ids=drawn, shares=torch.full(drawn.shape, 1 / 3))
        distribution = merged(distribution)
        total += torch.autograd.grad(
            objective("fkl").losses(logits, distribution, labels).sum(), logits
        )[0]
    expected = logits.detach().softmax(-1) - probs
    torch.testing.assert_close(total / num_offsets, expected, atol=2e-3, rtol=0)


def merged(distribution: SparseDistribution) -> SparseDistribution:
    """Distinct ids, as the contract wants them."""
    dense = dense_probs(distribution, VOCAB_SIZE)
    best = dense.topk(3)
    return SparseDistribution(ids=best.indices, shares=best.values)


def test_a_distribution_that_is_no_number_is_refused():
    probs = some_probs()
    probs[2] = torch.nan
    with pytest.raises(NumericalError, match="not finite"):
        draw_ids(probs, torch.zeros(len(probs), dtype=torch.float64), 4)


def sampled(on_disk, num_ids: int = 64, **changes):
    config = caching("sampled", num_sampled_ids=num_ids)
    return make_teacher(config, on_disk.with_(**changes), 100)


def test_shares_are_near_the_deployed_distribution(on_disk):
    packing, batch = all_rows(texts())
    params = SamplingParams(temperature=0.8, top_k=9)
    teacher = sampled(on_disk, sampling=params)
    teacher.prepare(packing.samples)
    rows = teacher.rows(batch)
    distribution = rows.distribution(slice(0, len(rows)))
    assert isinstance(distribution, SparseDistribution)
    torch.testing.assert_close(distribution.shares.sum(-1), torch.ones(len(rows)))
    for ids, shares in zip(distribution.ids.tolist(), distribution.shares.tolist(), strict=True):
        named = [token for token, share in zip(ids, shares, strict=True) if share > 0]
        assert len(set(named)) == len(named)
    kept = (expected_logits(on_disk.network, packing, batch) / 0.8).topk(9)
    expected = torch.zeros(len(rows), tiny.VOCAB_SIZE)
    expected.scatter_(-1, kept.indices, kept.values.softmax(-1))
    assert (dense_probs(distribution, tiny.VOCAB_SIZE) - expected).abs().max() < 1 / 64 + 1e-4


def test_drawn_ids_depend_on_the_text_alone(on_disk, tmp_path):
    packing, batch = all_rows(texts())
    found = []
    for place, samples in (("a", packing.samples), ("b", packing.samples[::-1])):
        teacher = sampled(on_disk, num_ids=4, cache_dir=tmp_path / place)
        teacher.prepare(samples)
        teacher.prepare(packing.samples)
        rows = teacher.rows(batch)
        found.append(dense_probs(rows.distribution(slice(0, len(rows))), tiny.VOCAB_SIZE))
    # Padding of a pass moves a distribution by a rounding, and with it a draw at most.
    assert (found[0] != found[1]).any(-1).float().mean() < 0.02


def test_a_greedy_distribution_is_one_id_and_exact(on_disk):
    packing, batch = all_rows(texts())
    teacher = sampled(on_disk, sampling=SamplingParams(temperature=0))
    teacher.prepare(packing.samples)
    rows = teacher.rows(batch)
    distribution = rows.distribution(slice(0, len(rows)))
    expected = expected_logits(on_disk.network, packing, batch).argmax(-1)
    assert distribution.ids[:, 0].tolist() == expected.tolist()
    assert distribution.shares.tolist() == [[1.0]] * len(rows)
    files = [*on_disk.source.cache_dir.glob("*/rows-*")]
    assert sum(path.stat().st_size - 300 for path in files) < 16 * len(rows)


def test_other_parameters_are_another_cache(on_disk):
    packing, _ = all_rows(texts(3))
    for sampling in (SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(top_p=0.9)):
        sampled(on_disk, sampling=sampling).prepare(packing.samples)
    sampled(on_disk, num_ids=8).prepare(packing.samples)
    assert len(list(on_disk.source.cache_dir.iterdir())) == 4


@pytest.mark.parametrize("num_ids", [0, 1 << 15])
def test_numbers_of_draws_that_cannot_be_kept_are_refused(num_ids, on_disk):
    with pytest.raises(InvalidRequest, match=f"num_sampled_ids is {num_ids}; it must be"):
        sampled(on_disk, num_ids=num_ids)


def test_a_batch_may_have_nothing_learned(on_disk):
    packing, batch = all_rows(texts(3))
    teacher = sampled(on_disk)
    teacher.prepare(packing.samples)
    rows = teacher.rows(replace(batch, predicts=torch.zeros_like(batch.predicts)))
    assert len(rows) == 0
    assert math.prod(rows.distribution(slice(0, 0)).ids.shape) == 0
