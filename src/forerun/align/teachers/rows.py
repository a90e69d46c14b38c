"""The order of learned rows in a sample, and the way from a batch back to its samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from forerun.align.batch import PackedBatch
from forerun.align.data.sample import Sample
from forerun.errors import InvalidCache

__all__ = ["learned_places", "one_per_row", "passes", "sample_runs"]


def learned_places(sample: Sample) -> Int64[Tensor, " learned"]:
    """Return the places whose next token is learned, ascending: the cached rows of a sample."""
    ranges = [torch.arange(start - 1, end - 1) for start, end in sample.spans]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)


def sample_runs(
    batch: PackedBatch, samples: Sequence[Sample]
) -> Iterator[tuple[int, Int64[Tensor, " rows"]]]:
    """Yield the learned rows of a batch, sample by sample in the order of the rows.

    Args:
        batch: over these samples.
        samples: as they were prepared.

    Yields:
        A sample's index, and which of its learned places the next rows are.

    Raises:
        InvalidCache: a row is none of the learned places of its sample.
    """
    predicts = batch.predicts.cpu()
    owners, counts = torch.unique_consecutive(batch.samples.cpu()[predicts], return_counts=True)
    positions = torch.split(batch.positions.cpu()[predicts], counts.tolist())
    for index, places in zip(owners.tolist(), positions, strict=True):
        known = learned_places(samples[index])
        rows = torch.searchsorted(known, places)
        if not len(known) or not torch.equal(known[rows.clamp(max=len(known) - 1)], places):
            raise InvalidCache(
                f"sample {index} of the batch is learned at other places than the sample prepared; "
                "a teacher must be prepared with the samples as they are packed"
            )
        yield index, rows


def passes(samples: Sequence[Sample], max_tokens: int) -> Iterator[list[int]]:
    """Yield groups of samples of similar length to read in one pass, every sample once.

    Args:
        samples: in any order.
        max_tokens: most tokens of a pass, padding included; one sample may have more.

    Yields:
        Indices of the samples of a pass, the longest first.
    """
    rows: list[int] = []
    for index in sorted(range(len(samples)), key=lambda i: -len(samples[i].token_ids)):
        if rows and (len(rows) + 1) * len(samples[rows[0]].token_ids) > max_tokens:
            yield rows
            rows = []
        rows.append(index)
    if rows:
        yield rows


def one_per_row(samples: Sequence[Sample], rows: Sequence[int]) -> PackedBatch:
    """Lay one sample in each row; the positions of padding go on counting."""
    width = max(len(samples[index].token_ids) for index in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    owners = torch.full((len(rows), width), -1)
    predicts = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, index in enumerate(rows):
        length = len(samples[index].token_ids)
        ids[row, :length] = torch.tensor(samples[index].token_ids)
        owners[row, :length] = index
        predicts[row, learned_places(samples[index])] = True
    positions = torch.arange(width).repeat(len(rows), 1)
    return PackedBatch(ids=ids, positions=positions, samples=owners, predicts=predicts)
