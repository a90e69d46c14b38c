"""The contract of teachers: the target's distribution at every learned row of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from forerun.align.batch import PackedBatch
from forerun.align.data.sample import Sample
from forerun.align.distribution import TargetDistribution

__all__ = ["ALONE", "ProcessShare", "Teacher", "TeacherRows"]


@runtime_checkable
class TeacherRows(Protocol):
    """The target's distribution at the learned rows of one batch, computed chunk by chunk.

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
        """Prepare for batches over these samples, which `PackedBatch.samples` indexes.

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
    """One of several processes that fill a cache together on a shared disk.

    Attributes:
        index: of this process.
        number: of processes.
        wait: returns in all of them once all have called it.
    """

    index: int = 0
    number: int = 1
    wait: Callable[[], None] = lambda: None

    def of(self, parts: Sequence[Part]) -> Iterator[tuple[Part, bool]]:
        """Yield the parts of this process, and whether it is to keep each of them.

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
