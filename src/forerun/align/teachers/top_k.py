"""Teacher over a server's log-probabilities of the most likely tokens.

All tokens that are not named count as one more token with the missing mass. The probabilities are
therefore exact at temperature 1, somewhat too small below it and too large above, and exact at any
temperature where the deployment's own truncation drops the tokens that are not named.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float64
from torch import Tensor

from forerun.align.data.sample import PackedBatch, Sample
from forerun.align.distribution import SparseDistribution
from forerun.align.teachers.base import sample_runs
from forerun.align.teachers.sampled import SparseRows
from forerun.errors import InvalidRequest
from forerun.sampling.config import SamplingParams

__all__ = ["TopKTeacher", "known_shares"]


class TopKTeacher:
    """Teacher over log-probabilities in the samples; see `Teacher`.

    Args:
        sampling: of the deployment.
        device: on which distributions are computed.
    """

    def __init__(self, *, sampling: SamplingParams, device: torch.device | str) -> None:
        self._sampling = sampling
        self._device = device
        self._samples: Sequence[Sample] = ()

    @property
    def truncated(self) -> bool:
        """Whether probability mass is missing: always, unless decoding is greedy."""
        return not self._sampling.greedy

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Check that the samples have log-probabilities; nothing is stored.

        Raises:
            InvalidRequest: a sample does not, or not for every learned token.
        """
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
        """Return the distributions at the learned rows of a batch.

        Raises:
            InvalidCache: a row was not prepared.
        """
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
        shares = known_shares(logprobs, self._sampling).float()
        distribution = SparseDistribution(ids=ids.to(self._device), shares=shares.to(self._device))
        return SparseRows(distribution)


def known_shares(
    logprobs: Float64[Tensor, "rows known"], sampling: SamplingParams
) -> Float64[Tensor, "rows known"]:
    """Convert top log-probabilities at temperature 1 to probabilities as deployed.

    Args:
        logprobs: natural logarithms, best first; -inf is padding.
        sampling: of the deployment.

    Returns:
        Shares whose sum falls short of 1 by what those that are not known have.
    """
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
