"""Packs samples into rows of equal width, in an endless stream that is shuffled in every epoch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import replace

import torch

from forerun.align.data.sample import PackedBatch, Sample, TopLogprobs
from forerun.align.data.selection import permuted
from forerun.errors import InvalidRequest
from forerun.theory.splitmix import INCREMENT, finalise

__all__ = ["Packing", "cut"]


class Packing:
    """Endless stream of packed rows, with the samples shuffled again in every epoch.

    A row of the stream is a pure function of the samples, the window, the seed and the row's
    number: ranks and resumed runs need no state to agree.

    Args:
        samples: to be packed; those without a learned token are left out, longer ones are cut.
        window: width of a row.
        seed: of the order.

    Attributes:
        samples: as packed: what a teacher prepares and `PackedBatch.samples` indexes.

    Raises:
        InvalidRequest: the window holds no pair of tokens, or nothing is to be learned.
    """

    def __init__(self, samples: Sequence[Sample], *, window: int, seed: int) -> None:
        if window < 2:
            raise InvalidRequest(f"window is {window}; a row needs at least 2 tokens")
        self.samples = tuple(cut(sample, window) for sample in samples if sample.num_learned)
        if not self.samples:
            raise InvalidRequest("there is nothing to learn: no sample has a learned token")
        self.window = window
        self.seed = seed
        self._rows = rows_of([len(sample.token_ids) for sample in self.samples], window)

    @property
    def rows_per_epoch(self) -> int:
        """Number of rows that hold every sample once."""
        return len(self._rows)

    @property
    def num_learned(self) -> int:
        """Number of learned tokens in an epoch."""
        return sum(sample.num_learned for sample in self.samples)

    def batch(self, first_row: int, num_rows: int) -> PackedBatch:
        """Return rows `first_row` to `first_row + num_rows - 1` of the stream."""
        shape = (num_rows, self.window)
        ids = torch.zeros(shape, dtype=torch.int64)
        # Padding counts its positions like one more sample.
        positions = torch.arange(self.window).repeat(num_rows, 1)
        samples = torch.full(shape, -1)
        predicts = torch.zeros(shape, dtype=torch.bool)
        for row in range(num_rows):
            start = 0
            for index in self._samples_in(first_row + row):
                sample = self.samples[index]
                end = start + len(sample.token_ids)
                ids[row, start:end] = torch.tensor(sample.token_ids)
                positions[row, start:] = torch.arange(self.window - start)
                samples[row, start:end] = index
                for learned, stop in sample.spans:
                    predicts[row, start + learned - 1 : start + stop - 1] = True
                start = end
            positions[row, start:] = torch.arange(self.window - start)
        return PackedBatch(ids=ids, positions=positions, samples=samples, predicts=predicts)

    def _samples_in(self, stream_row: int) -> list[int]:
        """Return the indices of the samples in one row of the stream."""
        epoch, row = divmod(stream_row, self.rows_per_epoch)
        key = finalise(self.seed) + epoch * INCREMENT
        return self._rows[permuted(row, self.rows_per_epoch, key)]


def rows_of(lengths: Sequence[int], window: int) -> list[list[int]]:
    """Assign samples to rows: the longest first, each to the fullest row that has room.

    Args:
        lengths: of every sample, at most the window.
        window: width of a row.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # tokens left and row, ascending
    for sample in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(room, (lengths[sample], 0))
        if place < len(room):
            left, row = room.pop(place)
        else:
            left, row = window, len(rows)
            rows.append([])
        rows[row].append(sample)
        insort(room, (left - lengths[sample], row))
    return rows


def cut(sample: Sample, window: int) -> Sample:
    """Cut a sample to `window` tokens at most, so that it keeps as many learned tokens as possible.

    What follows the last learned token teaches nothing and goes first. Then the beginning goes, as
    far as it has to for all learned tokens to stay, but never so far that fewer than half a window
    of tokens stand before the first of them (or all there are). Then the end goes.

    Args:
        sample: with at least one learned token.
        window: most tokens, at least 2.
    """
    first, last = sample.spans[0][0], sample.spans[-1][1]
    start = max(min(last - window, first - window // 2), 0)
    end = min(last, start + window)
    if start == 0 and end == len(sample.token_ids):
        return sample
    kept = [(max(a, start), min(b, end)) for a, b in sample.spans]
    return replace(
        sample,
        token_ids=sample.token_ids[start:end],
        spans=tuple((a - start, b - start) for a, b in kept if a < b),
        top_logprobs=None if sample.top_logprobs is None else kept_logprobs(sample, start, end),
    )


def kept_logprobs(sample: Sample, start: int, end: int) -> TopLogprobs:
    """Return the log-probabilities of learned tokens at text indices `start` to `end` - 1."""
    learned = (index for a, b in sample.spans for index in range(a, b))
    assert sample.top_logprobs is not None
    pairs = zip(learned, sample.top_logprobs, strict=True)
    return tuple(top for index, top in pairs if start <= index < end)
