"""Learned rows of samples and batches, and how samples are read together."""

from __future__ import annotations

import pytest
import torch
from tests.unit.align.teachers.conftest import all_rows, texts

from forerun.align.samples import Sample
from forerun.align.target import learned_places, one_per_row, packed_inputs, passes
from forerun.align.teachers import sample_runs


def test_a_place_is_learned_where_the_next_token_is():
    sample = Sample(prompt_hash="0", token_ids=(5, 6, 7, 8, 9), spans=((1, 2), (3, 5)))
    assert learned_places(sample).tolist() == [0, 2, 3]
    assert len(learned_places(Sample(prompt_hash="0", token_ids=(5,), spans=()))) == 0


@pytest.mark.parametrize("max_tokens", [1, 40, 70, 10_000])
def test_passes_read_every_sample_once_within_the_limit(max_tokens):
    samples = texts(20)
    found = list(passes(samples, max_tokens))
    assert sorted(index for rows in found for index in rows) == list(range(20))
    for rows in found:
        widest = max(len(samples[index].token_ids) for index in rows)
        assert len(rows) == 1 or len(rows) * widest <= max_tokens


def test_a_row_holds_one_sample():
    samples = texts(4)
    batch = one_per_row(samples, [2, 0])
    for row, index in enumerate([2, 0]):
        length = len(samples[index].token_ids)
        assert tuple(batch.ids[row, :length].tolist()) == samples[index].token_ids
        assert batch.samples[row].tolist() == [index] * length + [-1] * (
            batch.ids.shape[1] - length
        )
        places = batch.predicts[row].nonzero()[:, 0]
        assert torch.equal(places, learned_places(samples[index]))


def test_runs_lead_back_to_the_learned_places_of_every_row():
    packing, batch = all_rows(texts())
    learned = batch.predicts
    places = []
    for index, rows in sample_runs(batch, packing.samples):
        places.extend((index, place) for place in learned_places(packing.samples[index])[rows])
    owners, positions = batch.samples[learned].tolist(), batch.positions[learned].tolist()
    assert places == list(zip(owners, positions, strict=True))


def test_a_sample_that_ends_a_row_and_begins_the_next_is_found_twice():
    (sample,) = texts(1)
    packing, _ = all_rows([sample])
    batch = packing.batch(0, 3)  # three epochs of the one row
    rows = torch.cat([rows for _, rows in sample_runs(batch, packing.samples)])
    assert rows.tolist() == [*range(sample.num_learned)] * 3


def test_decoders_that_do_not_tell_samples_apart_are_told():
    _, batch = all_rows(texts())
    assert "attention_mask" not in packed_inputs(batch, "llama")
    seen = packed_inputs(batch, "opt")["attention_mask"]
    assert seen.shape == (len(batch.ids), 1, batch.ids.shape[1], batch.ids.shape[1])
    first_length = int((batch.positions[0] == 0).nonzero()[1])
    assert seen[0, 0, first_length].nonzero().tolist() == [[first_length]]
    assert seen[0, 0, first_length - 1].nonzero()[:, 0].tolist() == list(range(first_length))
