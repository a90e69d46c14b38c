"""Teachers that compute distributions from last hidden states, recomputed or cached.

A state takes kilobytes where a row of logits takes hundreds, and nothing is lost: the cached head
gives the same logits as the target, so every objective may learn from them at any temperature. Both
are stored in the target's dtype, and training then does not need the target itself.

The teachers of attached heads also provide features, the residual stream entering some layers. Both
come from one pass, made in every training step or once for a cache.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from forerun.align.objectives import TargetDistribution, deployed_distribution
from forerun.align.samples import PackedBatch, Sample
from forerun.align.teachers.base import TeacherRows, sample_runs
from forerun.align.teachers.cache import CacheFiller, full_disk_named, key_of
from forerun.align.teachers.target import TargetHead, TargetModel, check_samples
from forerun.cache import find_cached, write_cached
from forerun.sampling.config import SamplingParams


class HeadRows:
    """Distributions computed from hidden states, in chunks of rows; see `TeacherRows`."""

    def __init__(
        self, *, hidden: Float[Tensor, "rows hidden"], head: TargetHead, sampling: SamplingParams
    ) -> None:
        self._hidden = hidden
        self._head = head
        self._sampling = sampling

    def __len__(self) -> int:
        return len(self._hidden)

    def distribution(self, rows: slice) -> TargetDistribution:
        return deployed_distribution(self._head.logits(self._hidden[rows]), self._sampling)


class ModelTeacher:
    """Teacher that runs the target over every batch; see `Teacher`."""

    truncated = False

    def __init__(self, target: TargetModel, sampling: SamplingParams) -> None:
        self._target = target
        self._sampling = sampling

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Refuse samples that the target cannot read; nothing is stored."""
        check_samples(samples, self._target)

    def rows(self, batch: PackedBatch) -> HeadRows:
        return HeadRows(
            hidden=self._target.hidden(batch), head=self._target.head, sampling=self._sampling
        )


HEAD, SUFFIX = "head", ".safetensors"
STATES = "states"
"""The column of a cache that holds hidden states."""


@dataclass(kw_only=True, eq=False)
class HiddenTeacher:
    """Teacher over cached hidden states; see `Teacher`."""

    truncated = False

    filler: CacheFiller
    sampling: SamplingParams
    device: torch.device | str
    _samples: Sequence[Sample] = field(init=False, default=())
    _head: TargetHead | None = field(init=False, default=None)

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Run the target over the samples whose hidden states are not cached."""
        target = self.filler.fill(samples, _states_column)
        self._head = _find_head(self.filler, target).to(self.device)
        self._samples = samples

    def rows(self, batch: PackedBatch) -> HeadRows:
        assert self._head is not None, "prepare comes first"
        cache, found = self.filler.cache, []
        for index, rows in sample_runs(batch, self._samples):
            states = cache.read(key_of(self._samples[index]))[STATES]
            found.append(states[rows])
        hidden = torch.cat(found) if found else self._head.weight.new_empty(0, self._head.width)
        return HeadRows(hidden=hidden.to(self.device), head=self._head, sampling=self.sampling)


def _states_column(
    target: TargetModel, sample: Sample, states: Float[Tensor, "rows *states hidden"]
) -> dict[str, Tensor]:
    return {STATES: states.cpu()}


def _find_head(filler: CacheFiller, target: TargetModel | None) -> TargetHead:
    """Return the target's output layer (LM head), from the cache if it is stored there."""
    folder, share = filler.cache.folder, filler.share
    head = _read_head(folder)
    share.wait()  # no process writes before all have read
    if head is None:
        head = (target or filler.load()).head
        if share.index == 0:
            _write_head(folder, head)
        share.wait()
    return head


def _write_head(folder: Path, head: TargetHead) -> None:
    """Write the target's output layer beside its hidden states."""
    tensors = {"weight": head.weight.cpu().contiguous()}
    if head.bias is not None:
        tensors["bias"] = head.bias.cpu().contiguous()
    numbers = json.dumps({"divisor": head.divisor, "cap": head.cap})
    with full_disk_named(folder):
        write_cached(folder, HEAD, SUFFIX, save(tensors, {"numbers": numbers}))


def _read_head(folder: Path) -> TargetHead | None:
    """Read the output layer beside the hidden states; None if it is missing or damaged."""
    path = find_cached(folder, HEAD, SUFFIX)
    if path is None:
        return None
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        tensors = {name: file.get_tensor(name) for name in names}
        numbers = json.loads(file.metadata()["numbers"])
    return TargetHead(weight=tensors["weight"], bias=tensors.get("bias"), **numbers)


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
    """Distributions and features of a batch, from given hidden states."""

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
        return self._states[:, :, :-1]

    @property
    def last(self) -> Float[Tensor, "rows width hidden"]:
        return self._states[:, :, -1]


class OnlineFeatures(ModelTeacher):
    """Teacher that runs the target over every batch; see `Teacher`."""

    def __init__(
        self, target: TargetModel, layers: tuple[int, ...], sampling: SamplingParams
    ) -> None:
        super().__init__(target, sampling)
        self._layers = layers

    def rows(self, batch: PackedBatch) -> FeaturesOfRows:
        return FeaturesOfRows(
            states=self._target.layer_states(batch, self._layers),
            batch=batch,
            head=self._target.head,
            sampling=self._sampling,
        )


@dataclass(kw_only=True, eq=False)
class CachedFeatures:
    """Teacher over cached hidden states of all rows; see `Teacher`."""

    truncated = False

    filler: CacheFiller
    layers: tuple[int, ...]
    sampling: SamplingParams
    device: torch.device | str
    _keys: list[str] = field(init=False, default_factory=list)
    _head: TargetHead | None = field(init=False, default=None)

    def prepare(self, samples: Sequence[Sample]) -> None:
        whole = [replace(sample, spans=((1, len(sample.token_ids)),)) for sample in samples]

        def read(target: TargetModel, batch: PackedBatch) -> Float[Tensor, "learned states hidden"]:
            states = target.layer_states(batch, self.layers)
            return states[batch.predicts.to(states.device)]

        target = self.filler.fill(whole, _states_column, read)
        self._head = _find_head(self.filler, target).to(self.device)
        self._keys = [key_of(sample) for sample in whole]

    def rows(self, batch: PackedBatch) -> FeaturesOfRows:
        assert self._head is not None, "prepare comes first"
        shape = (*batch.ids.shape, len(self.layers) + 1, self._head.width)
        states = torch.zeros(shape, dtype=self._head.weight.dtype)
        starts = (batch.positions == 0) & (batch.samples >= 0)  # of texts, not of padding
        for row, start in starts.nonzero().tolist():
            index = int(batch.samples[row, start])
            found = self.filler.cache.read(self._keys[index])[STATES]
            states[row, start : start + len(found)] = found
        return FeaturesOfRows(
            states=states.to(self.device), batch=batch, head=self._head, sampling=self.sampling
        )
