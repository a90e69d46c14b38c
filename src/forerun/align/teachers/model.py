"""A teacher that runs the target at every training step and stores nothing."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from forerun.align.batch import PackedBatch
from forerun.align.data.sample import Sample
from forerun.align.distribution import TargetDistribution, deployed_distribution
from forerun.align.teachers.target import TargetHead, TargetModel, check_samples
from forerun.sampling.config import SamplingParams

__all__ = ["HeadRows", "ModelTeacher"]


class HeadRows:
    """Distributions computed from hidden states, a chunk of rows at a time; see `TeacherRows`.

    Args:
        hidden: last hidden states of the learned rows.
        head: of the target.
        sampling: of the deployment.
    """

    def __init__(
        self, *, hidden: Float[Tensor, "rows hidden"], head: TargetHead, sampling: SamplingParams
    ) -> None:
        self._hidden = hidden
        self._head = head
        self._sampling = sampling

    def __len__(self) -> int:
        """Number of learned rows."""
        return len(self._hidden)

    def distribution(self, rows: slice) -> TargetDistribution:
        """Return the distribution at some rows, on the device of the head."""
        return deployed_distribution(self._head.logits(self._hidden[rows]), self._sampling)


class ModelTeacher:
    """Teacher that runs the target over every batch; see `Teacher`.

    Args:
        target: the target.
        sampling: of the deployment.
    """

    truncated = False

    def __init__(self, target: TargetModel, sampling: SamplingParams) -> None:
        self._target = target
        self._sampling = sampling

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Refuse samples that the target cannot read; nothing is stored.

        Raises:
            InvalidRequest: an id is outside its vocabulary, or a text longer than its context.
        """
        check_samples(samples, self._target)

    def rows(self, batch: PackedBatch) -> HeadRows:
        """Return the distributions at the learned rows of a batch."""
        return HeadRows(
            hidden=self._target.hidden(batch), head=self._target.head, sampling=self._sampling
        )
