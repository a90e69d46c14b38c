"""Chooses the texts that are learned, and packs them into rows in an endless shuffled stream.

Shuffling needs no state: a balanced Feistel network permutes the numbers of an even number of bits
for any round function. Numbers outside the range pass through it again until one falls inside,
which keeps it a permutation of the range ("cycle walking", Black and Rogaway 2002).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from forerun.align.config import Source
from forerun.align.samples import PackedBatch, PromptRecord, Sample, TopLogprobs
from forerun.errors import InvalidRequest
from forerun.theory.splitmix import INCREMENT, finalise

HASH_BITS = 64


def is_held_out(prompt_hash: str, held_out_share: float) -> bool:
    return int(prompt_hash, 16) < held_out_share * 2.0**HASH_BITS


def split(
    prompts: Iterable[PromptRecord], held_out_share: float
) -> tuple[list[PromptRecord], list[PromptRecord]]:
    """Split prompts into training and held-out prompts, without changing their order."""
    if not 0.0 <= held_out_share < 1.0:
        raise InvalidRequest(f"held_out_share is {held_out_share}; it must be from 0 to below 1")
    sides: tuple[list[PromptRecord], list[PromptRecord]] = ([], [])
    for prompt in prompts:
        sides[is_held_out(prompt.prompt_hash, held_out_share)].append(prompt)
    train, held_out = sides
    if not train:
        raise InvalidRequest(
            f"all {len(held_out)} prompts are held out: give more prompts, or lower the held-out "
            "share (--held-out-share)"
        )
    if held_out_share and not held_out:
        raise InvalidRequest(
            f"none of {len(train)} prompts is held out: give more prompts, raise the held-out "
            "share (--held-out-share), or name a file of prompts to judge with (--held-out)"
        )
    return train, held_out


def mix(samples: Sequence[Sample], shares: Mapping[Source, float], *, seed: int) -> list[Sample]:
    """Select as many samples as the shares allow, without using a sample twice.

    The source that runs out first decides how many. Of the others a shuffled selection is taken up
    to its share, so that every share is met to within the length of a sample. Sources without a
    share are left out.
    """
    groups = {source: [s for s in samples if s.source == source] for source in shares}
    learned = {source: sum(s.num_learned for s in group) for source, group in groups.items()}
    for source, num_learned in learned.items():
        if num_learned == 0:
            raise InvalidRequest(
                f"{shares[source]:.0%} of the tokens are to come from source {source!r}, which has "
                "none: set its share to 0, or give more prompts, for 'fixed' with responses"
            )
    num_all = min(learned[source] / share for source, share in shares.items())
    return [
        sample
        for source, share in shares.items()
        for sample in _selection(groups[source], share * num_all, seed)
    ]


def _selection(samples: Sequence[Sample], num_learned: float, seed: int) -> Iterator[Sample]:
    """Yield shuffled samples until they contain at least the given number of learned tokens."""
    num_taken = 0
    for index in range(len(samples)):
        # Half a token of slack: shares of a whole are met exactly, not short of rounding.
        if num_taken + 0.5 > num_learned:
            return
        sample = samples[permuted(index, len(samples), seed)]
        num_taken += sample.num_learned
        yield sample


NUM_ROUNDS = 6


def permuted(index: int, size: int, key: int) -> int:
    half_bits = max((size - 1).bit_length() + 1, 2) // 2
    while True:
        index = _shuffled_bits(index, half_bits, key)
        if index < size:
            return index


def _shuffled_bits(number: int, half_bits: int, key: int) -> int:
    """Apply the Feistel network once to a number of twice `half_bits` bits."""
    mask = (1 << half_bits) - 1
    left, right = number >> half_bits, number & mask
    for number_of_round in range(1, NUM_ROUNDS + 1):
        mixed = finalise(finalise(key + number_of_round * INCREMENT) ^ right)
        left, right = right, left ^ mixed & mask
    return left << half_bits | right


class Packing:
    """Endless stream of packed rows, with the samples shuffled again in every epoch.

    A row of the stream is a pure function of the samples, the window, the seed and the row's
    number: ranks and resumed runs need no state to agree.
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
        return len(self._rows)

    @property
    def num_learned(self) -> int:
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
        epoch, row = divmod(stream_row, self.rows_per_epoch)
        key = finalise(self.seed) + epoch * INCREMENT
        return self._rows[permuted(row, self.rows_per_epoch, key)]


def rows_of(lengths: Sequence[int], window: int) -> list[list[int]]:
    """Assign samples to rows: the longest first, each to the fullest row that has room."""
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
        top_logprobs=None if sample.top_logprobs is None else _kept_logprobs(sample, start, end),
    )


def _kept_logprobs(sample: Sample, start: int, end: int) -> TopLogprobs:
    """Return the log-probabilities of learned tokens at text indices `start` to `end` - 1."""
    learned = (index for a, b in sample.spans for index in range(a, b))
    assert sample.top_logprobs is not None
    pairs = zip(learned, sample.top_logprobs, strict=True)
    return tuple(top for index, top in pairs if start <= index < end)
