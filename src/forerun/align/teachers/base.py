"""Interface of teachers, the order of learned rows, and the disk space that a cache may take."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Int64
from torch import Tensor

from forerun.align.objectives import TargetDistribution
from forerun.align.samples import PackedBatch, Sample
from forerun.errors import CacheTooLarge, InvalidCache
from forerun.models.memory import readable


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

        Raises:
            CacheTooLarge: it would not fit, and nothing is written; or the disk filled up.
            InvalidCache: the folder holds the cache of something else.
            InvalidRequest: a sample has ids that the target lacks, is too long for it, or lacks the
                log-probabilities of a server.
        """

    def rows(self, batch: PackedBatch) -> TeacherRows:
        """Return the distributions at the learned rows of a batch over prepared samples."""


logger = logging.getLogger("forerun.preparation")

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessShare:
    """One of several processes that together fill a cache on a shared disk."""

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
    ranges = [torch.arange(start - 1, end - 1) for start, end in sample.spans]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)


def sample_runs(
    batch: PackedBatch, samples: Sequence[Sample]
) -> Iterator[tuple[int, Int64[Tensor, " rows"]]]:
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
    """Yield groups of samples of similar length, each to be read in one pass."""
    rows: list[int] = []
    for index in sorted(range(len(samples)), key=lambda i: -len(samples[i].token_ids)):
        if rows and (len(rows) + 1) * len(samples[rows[0]].token_ids) > max_tokens:
            yield rows
            rows = []
        rows.append(index)
    if rows:
        yield rows


def one_per_row(samples: Sequence[Sample], rows: Sequence[int]) -> PackedBatch:
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


ID_BYTES, COUNT_BYTES = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSizes:
    """Disk space of a cache."""

    what: str
    row_bytes: int
    fixed_bytes: int = 0

    @classmethod
    def of_states(
        cls, *, width: int, vocab_size: int, itemsize: int, num_layers: int = 0
    ) -> RowSizes:
        """Return the sizes of hidden states and of the output layer that maps them to logits."""
        features = f"features of {num_layers} layers and " if num_layers else ""
        return cls(
            what=f"{features}last hidden states",
            row_bytes=(num_layers + 1) * width * itemsize,
            fixed_bytes=(width + 1) * vocab_size * itemsize,
        )

    @classmethod
    def of_ids(cls, num_ids: int) -> RowSizes:
        return cls(what="drawn ids", row_bytes=num_ids * (ID_BYTES + COUNT_BYTES) + COUNT_BYTES)

    def total_bytes(self, num_rows: int) -> int:
        """Return the bytes of the given number of rows."""
        return self.fixed_bytes + num_rows * self.row_bytes


def check_room(folder: Path, num_rows: int, sizes: RowSizes, max_bytes: int | None) -> None:
    """Log the size of the rows to write, and refuse more than the disk has room for."""
    needed, allowed = sizes.total_bytes(num_rows), allowed_bytes(folder, max_bytes)
    logger.info(
        "caching %s of %s positions in %s: %s (%s each), %s may be taken",
        sizes.what,
        f"{num_rows:,}",
        folder,
        readable(needed),
        readable(sizes.row_bytes),
        readable(allowed),
    )
    if needed > allowed:
        raise CacheTooLarge(
            f"{sizes.what} of {num_rows:,} positions take {readable(needed)}, {readable(allowed)} "
            f"may be taken in {folder}: use fewer prompts, another folder, a higher limit, or the "
            "teacher that reruns the target (model)"
        )


def allowed_bytes(folder: Path, max_bytes: int | None) -> int:
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free * 9 // 10
    return free if max_bytes is None else min(free, max_bytes)
