"""Interface of teachers, and the order of learned rows in samples and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Int64
from torch import Tensor

from forerun.align.data.sample import PackedBatch, Sample
from forerun.align.objectives import TargetDistribution
from forerun.errors import InvalidCache

__all__ = [
    "ALONE",
    "ProcessShare",
    "Teacher",
    "TeacherRows",
    "learned_places",
    "one_per_row",
    "passes",
    "sample_runs",
]


@runtime_checkable
class TeacherRows(Protocol):
    """The target's distribution at the learned rows of one batch, computed in chunks.

    Full-vocabulary rows are large (256 rows x 152k are 156 MB in fp32), so no more than a chunk of
    them is ever asked for at once.
    """

    def __len__(self) -> int:
        """Number of learned rows in the batch."""

    def distribution(self, rows: slice) -> TargetDistribution:
        """Return the distribution at some rows, under the deployed temperature and truncation."""


@runtime_checkable
class Teacher(Protocol):
    """A source of the target's distributions."""

    @property
    def truncated(self) -> bool:
        """Whether probability mass is missing, as in a server's top-k."""

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Prepare for batches that contain these samples, for example by filling a cache.

        A cache computes and stores what it has not yet; what is there already is kept. Where
        several processes share that work, all of them must call.

        Raises:
            CacheTooLarge: it would not fit; nothing is written then.
        """

    def rows(self, batch: PackedBatch) -> TeacherRows:
        """Return the distributions at the learned rows of a batch over prepared samples."""


Part = TypeVar("Part")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessShare:
    """One of several processes that together fill a cache on a shared disk.

    Attributes:
        index: of this process.
        number: of processes.
        wait: returns in all of them once all have called it.
    """

    index: int = 0
    number: int = 1
    wait: Callable[[], None] = lambda: None

    def of(self, parts: Sequence[Part]) -> Iterator[tuple[Part, bool]]:
        """Yield the parts assigned to this process, and whether it stores the result of each.

        All processes get equally many, as a target whose weights are spread over them needs: where
        the parts run out, the first is done again for nothing.
        """
        for start in range(0, len(parts), self.number):
            place = start + self.index
            if place < len(parts):
                yield parts[place], True
            else:
                yield parts[0], False


ALONE = ProcessShare()
"""A single process, which waits for no other."""


def learned_places(sample: Sample) -> Int64[Tensor, " learned"]:
    """Return the indices whose next token is learned, in ascending order."""
    ranges = [torch.arange(start - 1, end - 1) for start, end in sample.spans]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)


def sample_runs(
    batch: PackedBatch, samples: Sequence[Sample]
) -> Iterator[tuple[int, Int64[Tensor, " rows"]]]:
    """Yield the learned rows of a batch, sample by sample in the order of the rows.

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
    """Yield groups of samples of similar length, each to be read in one pass.

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
    """Put each sample into a row of its own, padded to the longest."""
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
