"""Teachers of a draft: the target itself, or a cache of its hidden states or greedy choices.

A state takes kilobytes where a row of logits takes hundreds, and nothing is lost: the target's
output layer gives the same logits, so every objective may learn from them at any temperature.
States are stored in the target's dtype, and training needs its output layer alone. The teachers of
attached heads also provide features, the residual stream entering some layers.

A cache has one file per sample, whose name ends in the hash of its content: what a killed process
was writing is not read, and a damaged file is computed again. The name of the folder has everything
that decides its content, so the cache of a changed target is never used. The target runs once over
every sample that is missing, if the disk has room; several processes fill a cache together.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from forerun.align.config import TeacherConfig
from forerun.align.objectives import (
    DenseDistribution,
    SparseDistribution,
    TargetDistribution,
    TeacherRows,
    deployed_distribution,
)
from forerun.align.samples import PackedBatch, Sample
from forerun.align.target import (
    EngineTarget,
    TargetHead,
    TargetModel,
    TeacherSource,
    learned_places,
    one_per_row,
    passes,
)
from forerun.cache import hash_of, is_whole, write_cached
from forerun.errors import CacheTooLarge, InvalidCache, NumericalError
from forerun.models.memory import readable
from forerun.sampling.config import SamplingParams
from forerun.sampling.kernels import largest, row_chunks

logger = logging.getLogger("forerun.cache")
preparation = logging.getLogger("forerun.preparation")

FORMAT = 2
ROWS, SUFFIX = "rows", ".safetensors"
MAX_TOKENS = 4096
"""Tokens of one pass over the target."""


def allowed_bytes(folder: Path, max_bytes: int | None) -> int:
    """Return the bytes that may be written: nine tenths of the free ones, or `max_bytes`."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free * 9 // 10
    return free if max_bytes is None else min(free, max_bytes)


def sample_runs(
    batch: PackedBatch, samples: Sequence[Sample]
) -> Iterator[tuple[int, Int64[Tensor, " rows"]]]:
    """Yield sample and rows among its learned places, for every run of learned places."""
    predicts = batch.predicts.cpu()
    owners, counts = torch.unique_consecutive(batch.samples.cpu()[predicts], return_counts=True)
    positions = torch.split(batch.positions.cpu()[predicts], counts.tolist())
    for index, places in zip(owners.tolist(), positions, strict=True):
        yield index, torch.searchsorted(learned_places(samples[index]), places)


WHAT = {"hidden": "last hidden states", "features": "features and last hidden states"}
"""What a kind of cache holds, in words."""
Target = TargetModel | EngineTarget
MakeColumns = Callable[[Target, Float[Tensor, "rows states hidden"]], Mapping[str, Tensor]]
"""Returns what is cached of a sample, from the target's states at the rows that are learned."""


class TargetCache:
    """Cache on disk of what the target computes for samples, one file per sample.

    Args:
        kind: first part of the folder's name.
        settings: settings that decide the content, beside target, tokenizer, template and text.
        layers: layers of the target whose inputs are cached beside the last hidden states; None for
            a draft model.
    """

    def __init__(
        self,
        source: TeacherSource,
        config: TeacherConfig,
        kind: str,
        settings: Mapping[str, str],
        row_bytes: int,
        layers: tuple[int, ...] | None = None,
    ) -> None:
        identity = {
            "format": FORMAT,
            "kind": kind,
            "target_hash": source.target.content_hash,
            "tokenizer_hash": source.target.tokenizer_hash,
            "template_hash": source.target.template_hash,
            "settings": settings,
        }
        self.source = source
        self.kind = kind
        self.max_bytes = config.max_cache_bytes
        self.row_bytes = row_bytes
        self.layers = layers
        described = json.dumps(identity, sort_keys=True, indent=1) + "\n"
        self.folder = source.cache_dir / f"{kind}-{hash_of(described.encode())}"
        self._files: dict[str, Path] = {}

    def read(self, sample: Sample) -> dict[str, Tensor]:
        """Return the cached tensors of a sample by name; `fill` must have stored them."""
        path = self._files.get(hash_sample(sample))
        if path is None:
            raise InvalidCache(f"{self.folder} has no rows of a sample that was not prepared")
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise InvalidCache(
                f"{path} cannot be read any more: {error}; start again, and its content is "
                "computed again"
            ) from error

    def read_runs(
        self, batch: PackedBatch, samples: Sequence[Sample]
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the cached tensors of every run of learned places, in the order of the batch."""
        for index, rows in sample_runs(batch, samples):
            yield {name: part[rows] for name, part in self.read(samples[index]).items()}

    def fill(self, samples: Sequence[Sample], make_columns: MakeColumns) -> Target | None:
        """Compute what is missing; returns the target if it was loaded.

        Raises:
            CacheTooLarge: it would not fit, and nothing is written; or the disk filled up.
        """
        missing = self._list_missing(samples)
        if missing:
            self._check_room(sum(sample.num_learned for sample in missing))
        self.source.wait()  # no process writes before all have listed what is missing
        if not missing:
            return None
        target = self.source.scorer(missing)
        target.check(missing)
        self._run(target, missing, make_columns)
        self.source.wait()
        self._list_files()
        return target

    def _list_files(self) -> None:
        files = self.folder.glob(f"{ROWS}-*{SUFFIX}")
        self._files = {path.stem.split("-")[1]: path for path in files}

    def _list_missing(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples without an undamaged file, each once, after reading all files."""
        self._list_files()
        missing = []
        for key, sample in {hash_sample(sample): sample for sample in samples}.items():
            path = self._files.get(key)
            if path is not None and is_whole(path):
                continue
            missing.append(sample)
            if path is not None:
                logger.warning("%s is damaged; its content is computed again", path)
                with suppress(OSError):
                    path.unlink()
        return missing

    def _check_room(self, num_rows: int) -> None:
        """Log the size of the rows to write, and refuse more than the disk has room for."""
        needed, allowed = num_rows * self.row_bytes, allowed_bytes(self.folder, self.max_bytes)
        what = f"{WHAT.get(self.kind, self.kind)} of {num_rows:,} positions"
        preparation.info(
            "caching %s in %s: %s (%s each), %s may be taken",
            what,
            self.folder,
            readable(needed),
            readable(self.row_bytes),
            readable(allowed),
        )
        if needed > allowed:
            raise CacheTooLarge(
                f"{what} take {readable(needed)}, {readable(allowed)} may be taken in "
                f"{self.folder}: use fewer prompts, another folder, a higher limit, or the teacher "
                "that reruns the target (model)"
            )

    def _run(self, target: Target, samples: Sequence[Sample], make_columns: MakeColumns) -> None:
        index, number = self.source.process
        parts = [*passes(samples, MAX_TOKENS)][index::number]
        num_rows = sum(samples[index].num_learned for part in parts for index in part)
        num_done = 0
        for part in parts:
            batch = one_per_row(samples, part)
            states = target.states(batch, self.layers or ())
            for row, index in enumerate(part):
                learned = states[row, learned_places(samples[index]).to(states.device)]
                if not bool(learned.isfinite().all()):
                    raise NumericalError(
                        "the target's hidden states are not finite in a response to the prompt "
                        f"{samples[index].prompt_hash}; load it in bf16 or fp32"
                    )
                self._write(samples[index], make_columns(target, learned))
                num_done += len(learned)
            self.source.on_progress(num_done, num_rows)

    def _write(self, sample: Sample, columns: Mapping[str, Tensor]) -> None:
        content = save({name: column.cpu().contiguous() for name, column in columns.items()})
        try:
            stem = f"{ROWS}-{hash_sample(sample)}"
            write_cached(self.folder, stem, SUFFIX, content, durable=False)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise CacheTooLarge(
                f"the disk of {self.folder} is full; finished files are kept and are not computed "
                "again: make room, or name another folder for caches, and start again"
            ) from error


def hash_sample(sample: Sample) -> str:
    """Return the hash of a sample's text and of its learned ranges."""
    content = json.dumps([sample.prompt_hash, sample.token_ids, sample.spans])
    return hash_of(content.encode())


STATES, LOG_SUMS, CHOICES = "states", "log_sums", "choices"
"""Columns of a cache: hidden states, log sums of the exponentials of their logits over T, and the
most likely tokens."""
LOG_SUM_BYTES = CHOICE_BYTES = 4


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
        source, target = self.cache.source, self.cache.fill(samples, self._make_columns)
        if target is None:
            self._head = source.read_head()
        else:
            self._head = target.head.to(source.probs_device, source.computed)
        self._samples = samples

    def _make_columns(
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
        cached = batch if layers is None else _mark_all_learned(batch)
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


def _mark_all_learned(batch: PackedBatch) -> PackedBatch:
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
        self.cache.fill(samples, self._make_columns)
        self._samples = samples

    def rows(self, batch: PackedBatch) -> ChosenRows:
        parts = self.cache.read_runs(batch, self._samples)
        found = [torch.zeros(0, dtype=torch.int64), *(part[CHOICES].long() for part in parts)]
        return ChosenRows(torch.cat(found)[:, None].to(self.cache.source.probs_device))

    def _make_columns(
        self, target: Target, states: Float[Tensor, "rows 1 hidden"]
    ) -> dict[str, Tensor]:
        parts = [
            largest(target.head.logits(states[rows, -1]))[1]
            for rows in row_chunks(len(states), target.head.vocab_size)
        ]
        return {CHOICES: torch.cat(parts).to(torch.int32)}
