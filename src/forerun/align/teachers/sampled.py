"""Teachers of some token ids per position: drawn from the target, or named by a server.

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

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from forerun.align.objectives import DenseDistribution, SparseDistribution, deployed_distribution
from forerun.align.samples import PackedBatch, Sample
from forerun.align.teachers.base import sample_runs
from forerun.align.teachers.cache import CacheFiller, key_of
from forerun.align.teachers.target import TargetModel
from forerun.errors import InvalidRequest, NumericalError
from forerun.sampling.config import SamplingParams
from forerun.sampling.kernels import row_chunks
from forerun.sampling.noise import position_key, request_key, uniform


class SparseRows:
    """Sparse distributions of learned rows; see `TeacherRows`."""

    def __init__(self, distribution: SparseDistribution) -> None:
        self._whole = distribution

    def __len__(self) -> int:
        return len(self._whole.ids)

    def distribution(self, rows: slice) -> SparseDistribution:
        return SparseDistribution(ids=self._whole.ids[rows], shares=self._whole.shares[rows])


@dataclass(kw_only=True, eq=False)
class SampledTeacher:
    """Teacher over cached token ids; see `Teacher`."""

    truncated = False

    filler: CacheFiller
    sampling: SamplingParams
    num_ids: int
    device: torch.device | str
    _samples: Sequence[Sample] = field(init=False, default=())

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Run the target over the samples whose token ids are not cached."""
        self.filler.fill(samples, self._columns)
        self._samples = samples

    def rows(self, batch: PackedBatch) -> SparseRows:
        ids, shares = [], []
        for index, rows in sample_runs(batch, self._samples):
            columns = self.filler.cache.read(key_of(self._samples[index]))
            own_ids, own_shares = padded(columns)
            ids.append(own_ids[rows])
            shares.append(own_shares[rows])
        width = max((part.shape[1] for part in ids), default=1)
        distribution = SparseDistribution(
            ids=joined(ids, width, torch.int64).to(self.device),
            shares=joined(shares, width, torch.float32).to(self.device),
        )
        return SparseRows(distribution)

    def _columns(
        self, target: TargetModel, sample: Sample, hidden: Float[Tensor, "rows hidden"]
    ) -> dict[str, Tensor]:
        """Return the cache's columns: distinct ids of all rows, their counts, and ids per row."""
        key = request_key(int(key_of(sample), 16), 0)
        keys = torch.tensor([position_key(key, row) for row in range(len(hidden))])
        parts = []
        for rows in row_chunks(len(hidden), target.head.vocab_size):
            distribution = deployed_distribution(target.head.logits(hidden[rows]), self.sampling)
            if isinstance(distribution, DenseDistribution):
                offsets = uniform(keys[rows].to(distribution.target_probs.device))
                parts.append(distinct(draw_ids(distribution.target_probs, offsets, self.num_ids)))
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
    # The last may round up to the sum itself, which lies behind every token.
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
    columns: dict[str, Tensor],
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


def joined(parts: Sequence[Tensor], width: int, dtype: torch.dtype) -> Tensor:
    if not parts:
        return torch.zeros(0, width, dtype=dtype)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])


@dataclass(kw_only=True, eq=False)
class TopKTeacher:
    """Teacher over log-probabilities in the samples; see `Teacher`."""

    sampling: SamplingParams
    device: torch.device | str
    _samples: Sequence[Sample] = field(init=False, default=())

    @property
    def truncated(self) -> bool:
        """Whether probability mass is missing: always, unless decoding is greedy."""
        return not self.sampling.greedy

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
        self._samples = samples

    def rows(self, batch: PackedBatch) -> SparseRows:
        named: list[tuple[tuple[int, float], ...]] = []
        for index, rows in sample_runs(batch, self._samples):
            given = self._samples[index].top_logprobs
            assert given is not None
            named.extend(given[row] for row in rows.tolist())
        width = max(map(len, named), default=1)
        ids = torch.zeros(len(named), width, dtype=torch.int64)
        logprobs = torch.full((len(named), width), -torch.inf, dtype=torch.float64)
        for row, tokens in enumerate(named):
            best_first = sorted(tokens, key=lambda token: -token[1])
            ids[row, : len(tokens)] = torch.tensor([token for token, _ in best_first])
            logprobs[row, : len(tokens)] = torch.tensor([value for _, value in best_first])
        shares = known_shares(logprobs, self.sampling).float()
        distribution = SparseDistribution(ids=ids.to(self.device), shares=shares.to(self.device))
        return SparseRows(distribution)


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
