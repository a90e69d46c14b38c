"""The teacher's contract: the target's law at every learned row of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from forerun.align.batch import Batch
from forerun.align.data.sample import Sample
from forerun.align.law import TargetLaw

__all__ = ["Teacher", "TeacherRows"]


@runtime_checkable
class TeacherRows(Protocol):
    """The target's law at the learned rows of one batch, made chunk by chunk.

    Full-vocabulary rows are large (256 rows x 152k are 156 MB in fp32), so no more than a chunk of
    them is ever asked for at once.
    """

    def __len__(self) -> int:
        """Learned rows of the batch."""

    def law(self, rows: slice) -> TargetLaw:
        """The law at some of them, under the deployed temperature and truncation."""


@runtime_checkable
class Teacher(Protocol):
    """Knows the target's probabilities."""

    @property
    def truncated(self) -> bool:
        """Whether mass is missing (a server's top-k)."""

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Make ready for batches over these samples, whose indices `Batch.samples` are.

        A cache computes and stores what it has not yet; what is there already is kept. Where
        several processes share that work, all of them must call.

        Raises:
            CacheTooLarge: it would not fit, said before anything is written.
        """

    def rows(self, batch: Batch) -> TeacherRows:
        """The law at the learned rows of a batch over prepared samples."""
