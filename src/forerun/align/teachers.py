"""Teachers of a draft: the target itself, caches of its hidden states or drawn ids, or a server.

A state takes kilobytes where a row of logits takes hundreds, and nothing is lost: the cached head
gives the same logits as the target, so every objective may learn from them at any temperature. Both
are stored in the target's dtype, and training then does not need the target itself.

The teachers of attached heads also provide features, the residual stream entering some layers. Both
come from one pass, made in every training step or once for a cache.

Shares of drawn ids are unbiased estimates of the target's probabilities, so an objective that is
linear in these has an unbiased gradient; any other objective would be biased. The draws of a row
are equidistant on the cumulative sum of its probabilities, with one random offset: the share of an
id then differs from its probability by less than one draw, where independent draws would differ by
the root of their number. A greedy distribution is one id, stored as it is.

Of a server's log-probabilities, all tokens that are not named count as one more token with the
missing mass. The probabilities are therefore exact at temperature 1, somewhat too small below it
and too large above, and exact at any temperature where the deployment's own truncation drops the
tokens that are not named.

Source: arXiv 2503.16870 on drawn ids; Kitagawa 1996 on equidistant draws.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64
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
    hash_sample,
    learned_places,
)
from forerun.errors import InvalidCache, InvalidRequest, NumericalError
from forerun.models.checkpoint import ModelFiles
from forerun.sampling.config import SamplingParams
from forerun.sampling.kernels import row_chunks
from forerun.sampling.noise import position_key, request_key, uniform

logger = logging.getLogger("forerun.align")
preparation = logging.getLogger("forerun.preparation")

ID_BYTES, COUNT_BYTES = 4, 2
STATES, LOG_SUMS = "states", "log_sums"
"""Columns of a cache: hidden states, and log sums of the exponentials of their logits over T."""
LOG_SUM_BYTES = 4


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
            InvalidRequest: a sample has ids that the target lacks, is too long for it, or lacks the
                log-probabilities of a server.
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
        kind = "sampled"
    elif kind == "auto":
        allowed = allowed_bytes(source.cache_dir, config.max_cache_bytes)
        fits = state_sizes(source, layers).total_bytes(num_rows) <= allowed
        kind = "hidden" if fits else "model"
        if not fits:
            preparation.warning(
                "hidden states would not fit %s: the target is rerun instead", source.cache_dir
            )
    if kind == "model":
        return ModelTeacher(source.load(), source.sampling, layers)
    if kind == "hidden":
        return _cached_states(config, source, layers)
    return TopKTeacher(source) if kind == "top-k" else _cached_ids(config, source)


def _cached_states(
    config: TeacherConfig, source: TeacherSource, layers: tuple[int, ...] | None
) -> CachedStates:
    settings = {"dtype": str(source.state_dtype), "layers": ",".join(map(str, layers or ()))}
    if _keeps_log_sums(source.sampling, layers):
        settings["temperature"] = str(source.sampling.temperature)
    kind, sizes = "hidden" if layers is None else "features", state_sizes(source, layers)
    return CachedStates(TargetCache(source, config, kind, settings, sizes, layers or ()), layers)


def _cached_ids(config: TeacherConfig, source: TeacherSource) -> SampledTeacher:
    sampling = source.sampling
    num_ids = 1 if sampling.greedy else config.num_sampled_ids
    settings = {
        "num_ids": num_ids,
        "temperature": sampling.temperature,
        "min_p": sampling.min_p,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
    }
    row_bytes = num_ids * (ID_BYTES + COUNT_BYTES) + COUNT_BYTES
    sizes = RowSizes(what="drawn ids", row_bytes=row_bytes)
    return SampledTeacher(TargetCache(source, config, "sampled", settings, sizes), num_ids)


def state_sizes(source: TeacherSource, layers: tuple[int, ...] | None = None) -> RowSizes:
    """Return the sizes of hidden states, of features, and of the layer that makes logits."""
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
        fixed_bytes=(width + 1) * architecture.vocab_size * itemsize,
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


class SparseRows:
    """Sparse distributions of learned rows; see `TeacherRows`."""

    def __init__(self, distribution: SparseDistribution) -> None:
        self._whole = distribution

    def __len__(self) -> int:
        return len(self._whole.ids)

    def distribution(self, rows: slice) -> SparseDistribution:
        return SparseDistribution(ids=self._whole.ids[rows], shares=self._whole.shares[rows])


def _joined(parts: Sequence[SparseDistribution], device: torch.device) -> SparseRows:
    """Join the rows of several samples, padded with id 0 of probability 0."""
    width = max((part.ids.shape[1] for part in parts), default=1)
    ids, shares = [torch.zeros(0, width, dtype=torch.int64)], [torch.zeros(0, width)]
    ids += [F.pad(part.ids, (0, width - part.ids.shape[1])) for part in parts]
    shares += [F.pad(part.shares, (0, width - part.shares.shape[1])) for part in parts]
    return SparseRows(
        SparseDistribution(ids=torch.cat(ids).to(device), shares=torch.cat(shares).to(device))
    )


class SampledTeacher:
    """Teacher over cached token ids; see `Teacher`."""

    def __init__(self, cache: TargetCache, num_ids: int) -> None:
        self.cache = cache
        self._num_ids = num_ids
        self._samples: Sequence[Sample] = ()

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Run the target over the samples whose token ids are not cached."""
        self.cache.fill(samples, self._columns)
        self._samples = samples

    def rows(self, batch: PackedBatch) -> SparseRows:
        parts = []
        for index, rows in sample_runs(batch, self._samples):
            ids, shares = padded(self.cache.read(self._samples[index]))
            parts.append(SparseDistribution(ids=ids[rows], shares=shares[rows]))
        return _joined(parts, self.cache.source.probs_device)

    def _columns(
        self, target: Target, sample: Sample, states: Float[Tensor, "rows 1 hidden"]
    ) -> dict[str, Tensor]:
        """Return the cache's columns: distinct ids of all rows, their counts, and ids per row."""
        key = request_key(int(hash_sample(sample), 16), 0)
        keys = torch.tensor([position_key(key, row) for row in range(len(states))])
        parts = []
        for rows in row_chunks(len(states), target.head.vocab_size):
            logits = target.head.logits(states[rows, -1])
            distribution = deployed_distribution(logits, self.cache.source.sampling)
            if isinstance(distribution, DenseDistribution):
                offsets = uniform(keys[rows].to(distribution.target_probs.device))
                parts.append(distinct(draw_ids(distribution.target_probs, offsets, self._num_ids)))
            else:
                parts.append(distinct(distribution.ids))
        ids, counts, sizes = (torch.cat(column) for column in zip(*parts, strict=True))
        return {"ids": ids, "counts": counts, "sizes": sizes}


def draw_ids(
    probs: Float[Tensor, "rows vocab"], offsets: Float64[Tensor, " rows"], num_ids: int
) -> Int64[Tensor, "rows num_ids"]:
    """Draw token ids by systematic sampling at equal distances on the cumulative sums."""
    sums = probs.cumsum(-1, dtype=torch.float64)
    if not bool(sums[:, -1].isfinite().all()):
        raise NumericalError("the target's logits are not finite; load it in bf16 or fp32")
    steps = torch.arange(num_ids, device=probs.device, dtype=torch.float64)
    wanted = (steps + offsets[:, None]) / num_ids * sums[:, -1:]
    # The last one may be rounded up to the sum itself, which is beyond every token's interval.
    below = torch.nextafter(sums[:, -1:], torch.zeros_like(sums[:, -1:]))
    return torch.searchsorted(sums, torch.minimum(wanted, below), right=True)


def distinct(drawn: Int64[Tensor, "rows draws"]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct ids of sorted rows, their counts, and the number of ids per row."""
    num_rows, num_draws = drawn.shape
    starts = torch.ones_like(drawn, dtype=torch.bool)
    starts[:, 1:] = drawn[:, 1:] != drawn[:, :-1]
    first = starts.flatten().nonzero()[:, 0]
    ends = torch.cat((first[1:], first.new_tensor([num_rows * num_draws])))
    columns = (drawn[starts].to(torch.int32), ends - first, starts.sum(-1))
    return (columns[0].cpu(), columns[1].to(torch.int16).cpu(), columns[2].to(torch.int16).cpu())


def padded(
    columns: Mapping[str, Tensor],
) -> tuple[Int64[Tensor, "rows some"], Float[Tensor, "rows some"]]:
    """Return ids and probabilities of a sample's rows, padded with id 0 of probability 0."""
    sizes = columns["sizes"].to(torch.int64)
    width = int(sizes.max())
    filled = torch.arange(width) < sizes[:, None]
    ids = torch.zeros(filled.shape, dtype=torch.int64)
    counts = torch.zeros(filled.shape)
    ids[filled] = columns["ids"].to(torch.int64)
    counts[filled] = columns["counts"].to(torch.float32)
    return ids, counts / counts.sum(-1, keepdim=True)


class TopKTeacher:
    """Teacher over log-probabilities in the samples; see `Teacher`."""

    def __init__(self, source: TeacherSource) -> None:
        self._source = source
        self._samples: Sequence[Sample] = ()

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Check that the samples have log-probabilities; nothing is stored."""
        for sample in samples:
            given = sample.top_logprobs
            if given is None or len(given) != sample.num_learned or not all(given):
                raise InvalidRequest(
                    f"a response to the prompt {sample.prompt_hash} has no log-probabilities: let "
                    "a server write all responses (responses_from) that gives them, or use "
                    'teacher "hidden" or "model"'
                )
        if not self._source.sampling.greedy and self._source.share.index == 0:
            logger.warning("the distributions are truncated to the tokens that the server named")
        self._samples = samples

    def rows(self, batch: PackedBatch) -> SparseRows:
        parts = []
        for index, rows in sample_runs(batch, self._samples):
            given = self._samples[index].top_logprobs
            assert given is not None
            parts.append(_known_distribution([given[row] for row in rows], self._source.sampling))
        return _joined(parts, self._source.probs_device)


def _known_distribution(
    named: Sequence[Sequence[tuple[int, float]]], sampling: SamplingParams
) -> SparseDistribution:
    """Return the deployed distributions of rows of which the most likely tokens are known."""
    width = max(map(len, named), default=1)
    ids = torch.zeros(len(named), width, dtype=torch.int64)
    logprobs = torch.full((len(named), width), -torch.inf, dtype=torch.float64)
    for row, tokens in enumerate(named):
        best_first = sorted(tokens, key=lambda token: -token[1])
        ids[row, : len(tokens)] = torch.tensor([token for token, _ in best_first])
        logprobs[row, : len(tokens)] = torch.tensor([value for _, value in best_first])
    return SparseDistribution(ids=ids, shares=known_shares(logprobs, sampling).float())


def known_shares(
    logprobs: Float64[Tensor, "rows known"], sampling: SamplingParams
) -> Float64[Tensor, "rows known"]:
    """Convert top log-probabilities at temperature 1 to probabilities as deployed."""
    if sampling.greedy:
        shares = torch.zeros_like(logprobs)
        shares[:, 0] = 1.0
        return shares
    missing = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=0.0)
    known = (logprobs / sampling.temperature).exp()
    rest = missing ** (1 / sampling.temperature)
    is_named = logprobs > -torch.inf
    if sampling.min_p > 0:
        kept = known >= sampling.min_p * known[:, :1]
        # Tokens that are not known are no likelier than the least likely one that is.
        known, rest = known * kept, rest * (kept | ~is_named).all(-1, keepdim=True)
    if sampling.top_k > 0:
        known = known * (torch.arange(known.shape[1], device=known.device) < sampling.top_k)
        rest = rest * (is_named.sum(-1, keepdim=True) < sampling.top_k)
    if sampling.top_p < 1:
        known, rest = nucleus(known, rest, sampling.top_p)
    return known / (known.sum(-1, keepdim=True) + rest)


def nucleus(
    known: Float64[Tensor, "rows known"], rest: Float64[Tensor, "rows 1"], top_p: float
) -> tuple[Float64[Tensor, "rows known"], Float64[Tensor, "rows 1"]]:
    """Apply top_p: return the kept known tokens, and the mass that unknown tokens keep."""
    wanted = top_p * (known.sum(-1, keepdim=True) + rest)
    before = known.cumsum(-1) - known
    kept = known * (before < wanted)
    return kept, (wanted - known.sum(-1, keepdim=True)).clamp(min=0.0)
