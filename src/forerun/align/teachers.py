"""Teachers of a draft: the target itself, or a cache of its hidden states or greedy choices.

A state takes kilobytes where a row of logits takes hundreds, and nothing is lost: the target's
output layer gives the same logits, so every objective may learn from them at any temperature.
States are stored in the target's dtype, and training needs its output layer alone.

The teachers of attached heads also provide features, the residual stream entering some layers. Both
come from one pass, made in every training step or once for a cache.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from forerun.align.target_cache import (
    RowSizes,
    Target,
    TargetCache,
    TeacherSource,
    allowed_bytes,
    learned_places,
)
from forerun.errors import InvalidCache
from forerun.models.checkpoint import ModelFiles
from forerun.sampling.config import SamplingParams
from forerun.sampling.kernels import largest, row_chunks

logger = logging.getLogger("forerun.align")
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

    def __len__(self) -> int:
        """Number of learned rows in the batch."""

    def distribution(self, rows: slice) -> TargetDistribution:
        """Return the distribution at some rows, under the deployed temperature and truncation."""


@runtime_checkable
class FeatureTeacherRows(TeacherRows, Protocol):
    """Distributions at the learned rows of a batch, and hidden states of all its rows."""

    @property
    def features(self) -> Float[Tensor, "rows width layers hidden"]:
        """The residual stream at the input of each selected layer."""

    @property
    def last(self) -> Float[Tensor, "rows width hidden"]:
        """The last hidden state, after the final norm."""

    def over(self, tokens: Int64[Tensor, " some"]) -> TeacherRows:
        """Return the rows with the probabilities of these tokens alone, whose sum is below 1."""


@runtime_checkable
class Teacher(Protocol):
    """A source of the target's distributions."""

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Prepare for batches that contain these samples, for example by filling a cache.

        Raises:
            CacheTooLarge: it would not fit, and nothing is written; or the disk filled up.
            InvalidCache: the folder holds the cache of something else.
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
            with layers are `FeatureTeacherRows`, under temperature 1 for a greedy deployment.
    """
    kind = config.teacher
    if layers is not None and source.sampling.greedy:
        source = replace(source, sampling=replace(source.sampling, temperature=1.0))
    if kind == "auto" and source.sampling.greedy:
        sizes = RowSizes(what="choices", row_bytes=CHOICE_BYTES)
        return CachedChoices(TargetCache(source, config, "choices", {}, sizes))
    if kind == "auto":
        allowed = allowed_bytes(source.cache_dir, config.max_cache_bytes)
        fits = state_sizes(source, layers).total_bytes(num_rows) <= allowed
        kind = "hidden" if fits else "model"
        if not fits:
            preparation.warning(
                "hidden states would not fit %s: the target is rerun instead", source.cache_dir
            )
    if kind == "model":
        return ModelTeacher(source.load(), source.sampling, layers)
    return _cached_states(config, source, layers)


def _cached_states(
    config: TeacherConfig, source: TeacherSource, layers: tuple[int, ...] | None
) -> CachedStates:
    settings = {"dtype": str(source.state_dtype), "layers": ",".join(map(str, layers or ()))}
    if _keeps_log_sums(source.sampling, layers):
        settings["temperature"] = str(source.sampling.temperature)
    kind, sizes = "hidden" if layers is None else "features", state_sizes(source, layers)
    return CachedStates(TargetCache(source, config, kind, settings, sizes, layers or ()), layers)


def state_sizes(source: TeacherSource, layers: tuple[int, ...] | None = None) -> RowSizes:
    """Return the sizes of hidden states, or of features and hidden states."""
    files = ModelFiles.open(source.target)
    settings, architecture = files.settings, files.sizes
    width = architecture.hidden_size
    if layers is None:
        width = settings.get("word_embed_proj_dim") or width
    itemsize = source.state_dtype.itemsize
    return RowSizes(
        what=f"features of {len(layers)} layers and last hidden states"
        if layers
        else "last hidden states",
        row_bytes=(len(layers or ()) + 1) * width * itemsize
        + LOG_SUM_BYTES * _keeps_log_sums(source.sampling, layers),
    )


def _keeps_log_sums(sampling: SamplingParams, layers: tuple[int, ...] | None) -> bool:
    """Whether a row's normaliser is cached: for heads, which may draft a part of the vocabulary.

    A truncated distribution has another one, which depends on every logit.
    """
    return bool(layers) and (sampling.top_k, sampling.top_p, sampling.min_p) == (0, 1.0, 0.0)


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


class RowsOverTokens(HeadRows):
    """Probabilities of some tokens, whose logits alone are computed where normalisers are known."""

    def __init__(
        self, rows: HeadRows, tokens: Int64[Tensor, " some"], log_sums: Tensor | None
    ) -> None:
        head = rows._head if log_sums is None else rows._head.rows(tokens)
        super().__init__(hidden=rows._hidden, head=head, sampling=rows._sampling)
        self._tokens = tokens
        self._log_sums = log_sums

    def distribution(self, rows: slice) -> DenseDistribution:
        if self._log_sums is None:
            whole = super().distribution(rows)
            assert isinstance(whole, DenseDistribution)  # heads learn at a temperature above 0
            return DenseDistribution(target_probs=whole.target_probs[:, self._tokens])
        logits = self._head.logits(self._hidden[rows]).float() / self._sampling.temperature
        return DenseDistribution(target_probs=(logits - self._log_sums[rows, None]).exp())


class StateRows(HeadRows):
    """Distributions and features of a batch, from given hidden states.

    Args:
        log_sums: of every learned row, as `CachedStates` keeps them; None where they are not known.
    """

    def __init__(
        self,
        *,
        states: Float[Tensor, "rows width states hidden"],
        batch: PackedBatch,
        head: TargetHead,
        sampling: SamplingParams,
        log_sums: Float[Tensor, " learned"] | None = None,
    ) -> None:
        self._states = states
        self._log_sums = log_sums
        learned = self.last[batch.predicts.to(states.device)]
        super().__init__(hidden=learned, head=head, sampling=sampling)

    def over(self, tokens: Int64[Tensor, " some"]) -> RowsOverTokens:
        return RowsOverTokens(self, tokens, self._log_sums)

    @property
    def features(self) -> Float[Tensor, "rows width layers hidden"]:
        return self._states[:, :, :-1]

    @property
    def last(self) -> Float[Tensor, "rows width hidden"]:
        return self._states[:, :, -1]


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

    def rows(self, batch: PackedBatch) -> HeadRows:
        states = self._target.states(batch, self._layers or ())
        return _rows_of_states(states, batch, self._target.head, self._sampling, self._layers)


def _rows_of_states(
    states: Float[Tensor, "rows width states hidden"],
    batch: PackedBatch,
    head: TargetHead,
    sampling: SamplingParams,
    layers: tuple[int, ...] | None,
    log_sums: Float[Tensor, "rows width"] | None = None,
) -> HeadRows:
    if layers is not None:
        known = None if log_sums is None else log_sums[batch.predicts.to(states.device)]
        return StateRows(states=states, batch=batch, head=head, sampling=sampling, log_sums=known)
    hidden = states[batch.predicts.to(states.device)][:, -1]
    return HeadRows(hidden=hidden, head=head, sampling=sampling)


class CachedStates:
    """Teacher that computes the target's distributions from hidden states cached on disk.

    Without layers only the states of learned rows are cached, otherwise those of all rows. See
    `Teacher` and `make_teacher`.
    """

    def __init__(self, cache: TargetCache, layers: tuple[int, ...] | None) -> None:
        self.cache = cache
        self._layers = layers
        self._samples: Sequence[Sample] = ()
        self._head: TargetHead | None = None

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Run the target over the samples whose hidden states are not cached."""
        if self._layers is not None:
            samples = [replace(sample, spans=((1, len(sample.token_ids)),)) for sample in samples]
        self._head = self.cache.head(self.cache.fill(samples, self._columns))
        self._samples = samples

    def _columns(
        self, target: Target, sample: Sample, states: Float[Tensor, "rows states hidden"]
    ) -> dict[str, Tensor]:
        source = self.cache.source
        columns = {STATES: states.to(source.state_dtype)}
        if _keeps_log_sums(source.sampling, self._layers):
            last, temperature = columns[STATES][:, -1], source.sampling.temperature
            columns[LOG_SUMS] = torch.cat(
                [
                    (target.head.logits(last[rows]).float() / temperature).logsumexp(-1)
                    for rows in row_chunks(len(last), target.head.vocab_size)
                ]
            )
        return columns

    def rows(self, batch: PackedBatch) -> HeadRows:
        head, source = self._head, self.cache.source
        assert head is not None, "prepare comes first"
        cached = batch if self._layers is None else _with_all_learned(batch)
        places = cached.predicts.cpu()
        width = len(self._layers or ()) + 1
        states = torch.zeros((*batch.ids.shape, width, head.width), dtype=head.weight.dtype)
        log_sums = None
        if _keeps_log_sums(source.sampling, self._layers):
            log_sums = torch.zeros(batch.ids.shape)
        found = [
            (self.cache.read(self._samples[index]), rows)
            for index, rows in sample_runs(cached, self._samples)
        ]
        if found:
            states[places] = torch.cat([part[STATES][rows] for part, rows in found]).to(states)
        if found and log_sums is not None:
            log_sums[places] = torch.cat([part[LOG_SUMS][rows] for part, rows in found])
            log_sums = log_sums.to(source.probs_device)
        states = states.to(source.probs_device)
        return _rows_of_states(states, batch, head, source.sampling, self._layers, log_sums)


def _with_all_learned(batch: PackedBatch) -> PackedBatch:
    """Return a batch in which every token of a sample but its first is learned."""
    following = torch.zeros_like(batch.predicts)
    following[:, :-1] = batch.positions[:, 1:] == batch.positions[:, :-1] + 1
    return replace(batch, predicts=following & (batch.samples >= 0))


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


class ChosenRows:
    """The target's choice at every learned row; see `TeacherRows`."""

    def __init__(self, ids: Int64[Tensor, "rows 1"]) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def distribution(self, rows: slice) -> SparseDistribution:
        ids = self._ids[rows]
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
        found = [torch.zeros(0, dtype=torch.int64)]
        for index, rows in sample_runs(batch, self._samples):
            found.append(self.cache.read(self._samples[index])[CHOICES][rows].to(torch.int64))
        ids = torch.cat(found)[:, None].to(self.cache.source.probs_device)
        return ChosenRows(ids)

    def _columns(
        self, target: Target, sample: Sample, states: Float[Tensor, "rows 1 hidden"]
    ) -> dict[str, Tensor]:
        parts = [
            largest(target.head.logits(states[rows, -1]))[1]
            for rows in row_chunks(len(states), target.head.vocab_size)
        ]
        return {CHOICES: torch.cat(parts).to(torch.int32)}
