"""Teachers of a draft: the target itself, or a cache of its hidden states or greedy choices.

A state takes kilobytes where a row of logits takes hundreds, and nothing is lost: the target's
output layer gives the same logits, so every objective may learn from them at any temperature.
States are stored in the target's dtype, and training needs its output layer alone.

The teachers of attached heads also provide features, the residual stream entering some layers. Both
come from one pass, made in every training step or once for a cache.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.align.config import TeacherConfig
from forerun.align.objectives import (
    DenseDistribution,
    SparseDistribution,
    TargetDistribution,
    deployed_distribution,
)
from forerun.align.samples import PackedBatch, Sample
from forerun.align.target import TargetHead, TargetModel
from forerun.align.target_cache import Target, TargetCache, TeacherSource, allowed_bytes
from forerun.sampling.config import SamplingParams
from forerun.sampling.kernels import largest, row_chunks

preparation = logging.getLogger("forerun.preparation")

STATES, LOG_SUMS, CHOICES = "states", "log_sums", "choices"
"""Columns of a cache: hidden states, log sums of the exponentials of their logits over T, and the
most likely tokens."""
LOG_SUM_BYTES = CHOICE_BYTES = 4


@runtime_checkable
class TeacherRows(Protocol):
    """The target's distribution at the learned rows of one batch, computed in chunks.

    Full-vocabulary rows are large (256 rows x 152k are 156 MB in fp32), so no more than a chunk of
    them is ever asked for at once.
    """

    def distribution(self, rows: slice) -> TargetDistribution:
        """Return the distribution at some rows, under the deployed temperature and truncation."""


@runtime_checkable
class Teacher(Protocol):
    """A source of the target's distributions."""

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Prepare for batches that contain these samples, for example by filling a cache.

        Raises:
            CacheTooLarge: it would not fit, and nothing is written; or the disk filled up.
            InvalidRequest: a sample has ids that the target lacks, or is too long for it.
        """

    def rows(self, batch: PackedBatch) -> TeacherRows:
        """Return the distributions at the learned rows of a batch over prepared samples."""


def make_teacher(
    config: TeacherConfig,
    source: TeacherSource,
    num_rows: int,
    layers: tuple[int, ...] | None = None,
) -> Teacher:
    """Build the teacher; "auto" selects the cheapest exact teacher whose cache fits the disk.

    Args:
        num_rows: that a cache would hold.
        layers: whose inputs an attached head reads; None for a draft model. The rows of a teacher
            with layers are `StateRows` with features, under temperature 1 for a greedy deployment.
    """
    kind = config.teacher
    if layers is not None and source.sampling.greedy:
        source = replace(source, sampling=replace(source.sampling, temperature=1.0))
    if kind == "auto" and source.sampling.greedy:
        return CachedChoices(TargetCache(source, config, "choices", {}, CHOICE_BYTES))
    row_bytes = state_bytes(source, layers)
    if kind == "auto":
        allowed = allowed_bytes(source.cache_dir, config.max_cache_bytes)
        kind = "hidden" if num_rows * row_bytes <= allowed else "model"
        if kind == "model":
            preparation.warning(
                "hidden states would not fit %s: the target is rerun instead", source.cache_dir
            )
    if kind == "model":
        return ModelTeacher(source.load(), source.sampling, layers)
    settings = {"dtype": str(source.state_dtype), "layers": ",".join(map(str, layers or ()))}
    if _keeps_log_sums(source.sampling, layers):
        settings["temperature"] = str(source.sampling.temperature)
    name = "hidden" if layers is None else "features"
    return CachedStates(TargetCache(source, config, name, settings, row_bytes, layers))


def state_bytes(source: TeacherSource, layers: tuple[int, ...] | None = None) -> int:
    """Return the bytes of a row's hidden state, or of its features and hidden state."""
    width = source.target.sizes.hidden_size
    if layers is None:
        width = source.target.settings.get("word_embed_proj_dim") or width
    states = (len(layers or ()) + 1) * width * source.state_dtype.itemsize
    return states + LOG_SUM_BYTES * _keeps_log_sums(source.sampling, layers)


def _keeps_log_sums(sampling: SamplingParams, layers: tuple[int, ...] | None) -> bool:
    """Whether a row's normaliser is cached: for heads, which may draft a part of the vocabulary.

    A truncated distribution has another one, which depends on every logit.
    """
    return bool(layers) and (sampling.top_k, sampling.top_p, sampling.min_p) == (0, 1.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateRows:
    """Distributions at the learned rows of a batch, computed from hidden states in chunks.

    Attributes:
        hidden: last hidden state of every learned row, after the final norm.
        states: for heads, of all rows of the batch: the inputs of some layers, then the last state.
        log_sums: normaliser of every learned row, where a cache has them.
        tokens: those whose probabilities are given, whose sum is then below 1; None: all.
    """

    hidden: Float[Tensor, "learned hidden"]
    head: TargetHead
    sampling: SamplingParams
    states: Float[Tensor, "rows width states hidden"] | None = None
    log_sums: Float[Tensor, " learned"] | None = None
    tokens: Int64[Tensor, " some"] | None = None

    @property
    def features(self) -> Float[Tensor, "rows width layers hidden"]:
        """The residual stream at the input of each selected layer."""
        assert self.states is not None
        return self.states[:, :, :-1]

    @property
    def last(self) -> Float[Tensor, "rows width hidden"]:
        """The last hidden state of all rows."""
        assert self.states is not None
        return self.states[:, :, -1]

    def over(self, tokens: Int64[Tensor, " some"]) -> StateRows:
        """Return the rows with the probabilities of these tokens alone."""
        # Where normalisers are known, no other logit is computed.
        head = self.head if self.log_sums is None else self.head.rows(tokens)
        return replace(self, head=head, tokens=tokens)

    def distribution(self, rows: slice) -> TargetDistribution:
        """Return the distribution at some rows; see `TeacherRows`."""
        logits = self.head.logits(self.hidden[rows])
        if self.tokens is not None and self.log_sums is not None:
            logits = logits.float() / self.sampling.temperature
            return DenseDistribution(target_probs=(logits - self.log_sums[rows, None]).exp())
        whole = deployed_distribution(logits, self.sampling)
        if self.tokens is None:
            return whole
        assert isinstance(whole, DenseDistribution)  # heads learn at a temperature above 0
        return DenseDistribution(target_probs=whole.target_probs[:, self.tokens])


class ModelTeacher:
    """Teacher that runs the target over every batch; see `Teacher` and `make_teacher`."""

    def __init__(
        self,
        target: TargetModel,
        sampling: SamplingParams,
        layers: tuple[int, ...] | None = None,
    ) -> None:
        self._target = target
        self._sampling = sampling
        self._layers = layers

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Refuse samples that the target cannot read; nothing is stored."""
        self._target.check(samples)

    def rows(self, batch: PackedBatch) -> StateRows:
        states = self._target.states(batch, self._layers or ())
        return StateRows(
            hidden=states[batch.predicts.to(states.device)][:, -1],
            head=self._target.head,
            sampling=self._sampling,
            states=None if self._layers is None else states,
        )


class CachedStates:
    """Teacher that computes the target's distributions from hidden states cached on disk.

    Without layers only the states of learned rows are cached, otherwise those of all rows. See
    `Teacher` and `make_teacher`.
    """

    def __init__(self, cache: TargetCache) -> None:
        self.cache = cache
        self._keeps_log_sums = _keeps_log_sums(cache.source.sampling, cache.layers)
        self._samples: Sequence[Sample] = ()
        self._head: TargetHead | None = None

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Run the target over the samples whose hidden states are not cached."""
        if self.cache.layers is not None:
            samples = [replace(sample, spans=((1, len(sample.token_ids)),)) for sample in samples]
        source, target = self.cache.source, self.cache.fill(samples, self._columns)
        if target is None:
            self._head = source.read_head()
        else:
            self._head = target.head.to(source.probs_device, source.computed)
        self._samples = samples

    def _columns(
        self, target: Target, states: Float[Tensor, "rows states hidden"]
    ) -> dict[str, Tensor]:
        source = self.cache.source
        columns = {STATES: states.to(source.state_dtype)}
        if self._keeps_log_sums:
            last, temperature = columns[STATES][:, -1], source.sampling.temperature
            columns[LOG_SUMS] = torch.cat(
                [
                    (target.head.logits(last[rows]).float() / temperature).logsumexp(-1)
                    for rows in row_chunks(len(last), target.head.vocab_size)
                ]
            )
        return columns

    def rows(self, batch: PackedBatch) -> StateRows:
        head, source, layers = self._head, self.cache.source, self.cache.layers
        assert head is not None, "prepare comes first"
        cached = batch if layers is None else _with_all_learned(batch)
        places, learned = cached.predicts.cpu(), batch.predicts.cpu()
        shape = (*batch.ids.shape, len(layers or ()) + 1, head.width)
        states = torch.zeros(shape, dtype=head.weight.dtype)
        log_sums = torch.zeros(batch.ids.shape)
        if found := [*self.cache.read_runs(cached, self._samples)]:
            states[places] = torch.cat([part[STATES] for part in found]).to(states)
            if self._keeps_log_sums:
                log_sums[places] = torch.cat([part[LOG_SUMS] for part in found])
        device = source.probs_device
        return StateRows(
            hidden=states[learned][:, -1].to(device),
            head=head,
            sampling=source.sampling,
            states=None if layers is None else states.to(device),
            log_sums=log_sums[learned].to(device) if self._keeps_log_sums else None,
        )


def _with_all_learned(batch: PackedBatch) -> PackedBatch:
    """Return a batch in which every token of a sample but its first is learned."""
    following = torch.zeros_like(batch.predicts)
    following[:, :-1] = batch.positions[:, 1:] == batch.positions[:, :-1] + 1
    return replace(batch, predicts=following & (batch.samples >= 0))


@dataclass(frozen=True, slots=True, eq=False)
class ChosenRows:
    """The target's choice at every learned row; see `TeacherRows`."""

    ids: Int64[Tensor, "rows 1"]

    def distribution(self, rows: slice) -> SparseDistribution:
        ids = self.ids[rows]
        return SparseDistribution(ids=ids, shares=torch.ones(ids.shape, device=ids.device))


class CachedChoices:
    """Teacher over the cached choices of a greedy target; see `Teacher`."""

    def __init__(self, cache: TargetCache) -> None:
        self.cache = cache
        self._samples: Sequence[Sample] = ()

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Run the target over the samples whose choices are not cached."""
        self.cache.fill(samples, self._columns)
        self._samples = samples

    def rows(self, batch: PackedBatch) -> ChosenRows:
        parts = self.cache.read_runs(batch, self._samples)
        found = [torch.zeros(0, dtype=torch.int64), *(part[CHOICES].long() for part in parts)]
        return ChosenRows(torch.cat(found)[:, None].to(self.cache.source.probs_device))

    def _columns(self, target: Target, states: Float[Tensor, "rows 1 hidden"]) -> dict[str, Tensor]:
        parts = [
            largest(target.head.logits(states[rows, -1]))[1]
            for rows in row_chunks(len(states), target.head.vocab_size)
        ]
        return {CHOICES: torch.cat(parts).to(torch.int32)}
