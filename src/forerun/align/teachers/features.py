"""Teachers that also give the target's features, which heads on its hidden states read.

A row of text has the residual stream entering some layers, and the last hidden state, from which
the target's distribution is computed. Both come from one pass, made in every training step or once
for a cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.align.data.sample import PackedBatch, Sample
from forerun.align.distribution import TargetDistribution, deployed_distribution
from forerun.align.teachers.base import TeacherRows
from forerun.align.teachers.cache import key_of
from forerun.align.teachers.filling import CacheFiller
from forerun.align.teachers.hidden import find_head
from forerun.align.teachers.target import TargetHead, TargetModel, check_samples
from forerun.sampling.config import SamplingParams

__all__ = ["CachedFeatures", "FeatureTeacherRows", "FeaturesOfRows", "OnlineFeatures"]

STATES = "states"


@runtime_checkable
class FeatureTeacherRows(TeacherRows, Protocol):
    """Distributions at the learned rows of a batch, and hidden states of all its rows."""

    @property
    def features(self) -> Float[Tensor, "rows width layers hidden"]:
        """The residual stream entering each of the layers."""

    @property
    def last(self) -> Float[Tensor, "rows width hidden"]:
        """The last hidden state, after the final norm."""


class FeaturesOfRows:
    """Hidden states of all rows of a batch; see `FeatureTeacherRows`.

    Args:
        states: of the layers in order, then the last one.
        batch: whose rows they are.
        head: of the target.
        sampling: of the deployment.
    """

    def __init__(
        self,
        *,
        states: Float[Tensor, "rows width states hidden"],
        batch: PackedBatch,
        head: TargetHead,
        sampling: SamplingParams,
    ) -> None:
        self._states = states
        self._learned = self.last[batch.predicts.to(states.device)]
        self._head = head
        self._sampling = sampling

    @property
    def features(self) -> Float[Tensor, "rows width layers hidden"]:
        """The residual stream entering each of the layers."""
        return self._states[:, :, :-1]

    @property
    def last(self) -> Float[Tensor, "rows width hidden"]:
        """The last hidden state, after the final norm."""
        return self._states[:, :, -1]

    def __len__(self) -> int:
        """Number of learned rows."""
        return len(self._learned)

    def distribution(self, rows: slice) -> TargetDistribution:
        """Return the distribution at some learned rows."""
        return deployed_distribution(self._head.logits(self._learned[rows]), self._sampling)


class OnlineFeatures:
    """Teacher that runs the target over every batch; see `Teacher`.

    Args:
        target: frozen.
        layers: whose input is read.
        sampling: of the deployment.
    """

    truncated = False

    def __init__(
        self, target: TargetModel, layers: tuple[int, ...], sampling: SamplingParams
    ) -> None:
        self._target = target
        self._layers = layers
        self._sampling = sampling

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Refuse samples that the target cannot read; nothing is stored.

        Raises:
            InvalidRequest: an id is outside its vocabulary, or a text longer than its context.
        """
        check_samples(samples, self._target)

    def rows(self, batch: PackedBatch) -> FeaturesOfRows:
        """Return features and distributions of a batch."""
        return FeaturesOfRows(
            states=self._target.layer_states(batch, self._layers),
            batch=batch,
            head=self._target.head,
            sampling=self._sampling,
        )


class CachedFeatures:
    """Teacher over cached hidden states of all rows; see `Teacher`.

    Args:
        filler: of the cache.
        layers: whose input is kept.
        sampling: of the deployment.
        device: on which features are used.
    """

    truncated = False

    def __init__(
        self,
        *,
        filler: CacheFiller,
        layers: tuple[int, ...],
        sampling: SamplingParams,
        device: torch.device | str,
    ) -> None:
        self._filler = filler
        self._layers = layers
        self._sampling = sampling
        self._device = device
        self._keys: list[str] = []
        self._head: TargetHead | None = None

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Run the target over the samples whose features are not cached.

        Raises:
            CacheTooLarge: they would not fit, or the disk filled up.
            InvalidCache: the folder holds the cache of something else.
        """
        whole = [replace(sample, spans=((1, len(sample.token_ids)),)) for sample in samples]
        read = partial(learned_states, layers=self._layers)
        target = self._filler.fill(whole, states_column, read)
        self._head = find_head(self._filler, target).to(self._device)
        self._keys = [key_of(sample) for sample in whole]

    def rows(self, batch: PackedBatch) -> FeaturesOfRows:
        """Return features and distributions of a batch.

        Raises:
            InvalidCache: a row was not prepared.
        """
        assert self._head is not None, "prepare comes first"
        shape = (*batch.ids.shape, len(self._layers) + 1, self._head.width)
        states = torch.zeros(shape, dtype=self._head.weight.dtype)
        for row, start, index in texts_in(batch):
            found = self._filler.cache.read(self._keys[index])[STATES]
            states[row, start : start + len(found)] = found
        return FeaturesOfRows(
            states=states.to(self._device),
            batch=batch,
            head=self._head,
            sampling=self._sampling,
        )


def learned_states(
    target: TargetModel, batch: PackedBatch, *, layers: tuple[int, ...]
) -> Float[Tensor, "learned states hidden"]:
    """Return the hidden states that are cached, at the learned rows of a batch."""
    states = target.layer_states(batch, layers)
    return states[batch.predicts.to(states.device)]


def states_column(
    target: TargetModel, sample: Sample, states: Float[Tensor, "rows states hidden"]
) -> dict[str, Tensor]:
    """Return hidden states as the column of a cache."""
    return {STATES: states.cpu()}


def texts_in(batch: PackedBatch) -> Iterator[tuple[int, int, int]]:
    """Yield row, first place and sample of every text in a batch; padding is left out."""
    starts = (batch.positions == 0) & (batch.samples >= 0)
    for row, start in starts.nonzero().tolist():
        yield row, start, int(batch.samples[row, start])
