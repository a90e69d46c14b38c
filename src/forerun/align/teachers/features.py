"""Teachers that also provide the target's features, which attached heads read.

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
from forerun.align.teachers.base import TeacherRows
from forerun.align.teachers.cache import key_of
from forerun.align.teachers.filling import CacheFiller
from forerun.align.teachers.hidden import (
    STATES,
    HeadRows,
    ModelTeacher,
    find_head,
    states_column,
)
from forerun.align.teachers.target import TargetHead, TargetModel
from forerun.sampling.config import SamplingParams

__all__ = ["CachedFeatures", "FeatureTeacherRows", "FeaturesOfRows", "OnlineFeatures"]


@runtime_checkable
class FeatureTeacherRows(TeacherRows, Protocol):
    """Distributions at the learned rows of a batch, and hidden states of all its rows."""

    @property
    def features(self) -> Float[Tensor, "rows width layers hidden"]:
        """The residual stream at the input of each selected layer."""

    @property
    def last(self) -> Float[Tensor, "rows width hidden"]:
        """The last hidden state, after the final norm."""


class FeaturesOfRows(HeadRows):
    """Distributions and features of a batch, from given hidden states; see `FeatureTeacherRows`.

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
        learned = self.last[batch.predicts.to(states.device)]
        super().__init__(hidden=learned, head=head, sampling=sampling)

    @property
    def features(self) -> Float[Tensor, "rows width layers hidden"]:
        """The residual stream at the input of each selected layer."""
        return self._states[:, :, :-1]

    @property
    def last(self) -> Float[Tensor, "rows width hidden"]:
        """The last hidden state, after the final norm."""
        return self._states[:, :, -1]


class OnlineFeatures(ModelTeacher):
    """Teacher that runs the target over every batch; see `Teacher`.

    Args:
        target: frozen.
        layers: whose input is read.
        sampling: of the deployment.
    """

    def __init__(
        self, target: TargetModel, layers: tuple[int, ...], sampling: SamplingParams
    ) -> None:
        super().__init__(target, sampling)
        self._layers = layers

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
    """Return the cached last hidden states at the learned rows of a batch."""
    states = target.layer_states(batch, layers)
    return states[batch.predicts.to(states.device)]


def texts_in(batch: PackedBatch) -> Iterator[tuple[int, int, int]]:
    """Yield row, first column and sample of every text in a batch, without padding."""
    starts = (batch.positions == 0) & (batch.samples >= 0)
    for row, start in starts.nonzero().tolist():
        yield row, start, int(batch.samples[row, start])
