"""The teacher that reruns the target in every step: no cache, no preparation."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from forerun.align.batch import Batch
from forerun.align.data.sample import Sample
from forerun.align.law import TargetLaw
from forerun.align.teachers.head import Head
from forerun.align.teachers.laws import deployed_law
from forerun.align.teachers.target import TargetModel, check_samples
from forerun.sampling.config import SamplingParams

__all__ = ["HeadRows", "ModelTeacher"]


class HeadRows:
    """Laws made from hidden states, a chunk of rows at a time; see `TeacherRows`.

    Args:
        hidden: last hidden states of the learned rows.
        head: of the target.
        sampling: of the deployment.
    """

    def __init__(
        self, *, hidden: Float[Tensor, "rows hidden"], head: Head, sampling: SamplingParams
    ) -> None:
        self._hidden = hidden
        self._head = head
        self._sampling = sampling

    def __len__(self) -> int:
        """Learned rows."""
        return len(self._hidden)

    def law(self, rows: slice) -> TargetLaw:
        """The law at some of them, on the device of the head."""
        return deployed_law(self._head.logits(self._hidden[rows]), self._sampling)


class ModelTeacher:
    """See `Teacher`. Takes whatever batch it is given: text need not be known before.

    Args:
        target: the target.
        sampling: of the deployment.
    """

    truncated = False

    def __init__(self, target: TargetModel, sampling: SamplingParams) -> None:
        self._target = target
        self._sampling = sampling

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Nothing is stored; samples the target cannot read are refused.

        Raises:
            InvalidRequest: an id is outside its vocabulary, or a text longer than its context.
        """
        check_samples(samples, self._target)

    def rows(self, batch: Batch) -> HeadRows:
        """The law at the learned rows of a batch."""
        return HeadRows(
            hidden=self._target.hidden(batch), head=self._target.head, sampling=self._sampling
        )
