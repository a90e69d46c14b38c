from __future__ import annotations

import pytest
import torch

from forerun.align.samples import Packing, Sample
from forerun.errors import InvalidRequest


def sample(start: int, length: int, *spans: tuple[int, int]) -> Sample:
    return Sample(
        prompt_hash=f"{start:016x}",
        token_ids=tuple(range(start, start + length)),
        spans=spans or ((1, length),),
    )


def test_a_row_by_hand():
    packing = Packing([sample(10, 3, (1, 2)), sample(20, 4, (2, 4))], window=8, seed=0)
    assert packing.rows_per_epoch == 1
    batch = packing.batch(0, 1)
    # The longer one first; the other without what nobody learns behind its span.
    assert batch.ids.tolist() == [[20, 21, 22, 23, 10, 11, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1]]
    assert batch.samples.tolist() == [[1, 1, 1, 1, 0, 0, -1, -1]]
    assert batch.predicts.nonzero()[:, 1].tolist() == [1, 2, 4]
    assert batch.labels.tolist() == [22, 23, 11]


def test_learned_and_all_tokens_are_counted():
    packing = Packing([sample(10, 3, (1, 2)), sample(20, 4, (2, 4))], window=8, seed=0)
    assert packing.num_learned == 3


def test_samples_are_those_that_are_packed():
    """A teacher prepares these: cut, and without those that teach nothing."""
    empty = Sample(prompt_hash="0" * 16, token_ids=(1, 2), spans=())
    packing = Packing([empty, sample(10, 30, (1, 30))], window=8, seed=0)
    (only,) = packing.samples
    assert only.token_ids == tuple(range(10, 18))
    assert packing.batch(0, 1).samples.tolist() == [[0] * 8]


def test_epochs_are_shuffled_anew_and_by_the_seed():
    samples = [sample(100 * number, 8) for number in range(20)]

    def epoch(seed: int, number: int) -> list[int]:
        packing = Packing(samples, window=8, seed=seed)
        return packing.batch(20 * number, 20).samples[:, 0].tolist()

    orders = [epoch(seed, number) for seed in (0, 1) for number in (0, 1, 2)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len({tuple(order) for order in orders}) == 6


def test_the_stream_needs_no_state():
    samples = [sample(100 * number, 3 + number % 5) for number in range(17)]
    packing = Packing(samples, window=8, seed=3)
    together = packing.batch(0, 30)
    again = Packing(samples, window=8, seed=3)
    for row in (29, 3, 11):
        alone = again.batch(row, 1)
        for name in ("ids", "positions", "samples", "predicts"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[row])


@pytest.mark.parametrize(
    ("samples", "window", "message"),
    [
        ([], 8, "nothing to learn"),
        ([Sample(prompt_hash="0" * 16, token_ids=(1, 2), spans=())], 8, "nothing to learn"),
        ([sample(0, 3)], 1, "window is 1"),
    ],
)
def test_nothing_to_learn_is_refused(samples, window, message):
    with pytest.raises(InvalidRequest, match=message):
        Packing(samples, window=window, seed=0)
