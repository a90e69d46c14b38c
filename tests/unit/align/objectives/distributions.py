"""Draft logits and target distributions for tests of objectives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.align.objectives import DenseDistribution, SparseDistribution, TargetDistribution


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.empty(*shape, dtype=torch.float64).normal_(generator=generator)


def dense_distribution(rows: int, vocab: int, seed: int = 1) -> DenseDistribution:
    """Every token possible, some a millionfold likelier than others."""
    probs = normal(rows, vocab, seed=seed, scale=3).softmax(-1)
    return DenseDistribution(target_probs=probs.float())


def truncated_distribution(rows: int, vocab: int, seed: int = 2) -> DenseDistribution:
    """As left by top_k: half of the tokens impossible."""
    logits = normal(rows, vocab, seed=seed, scale=2)
    logits[logits < logits.median(-1, keepdim=True).values] = -torch.inf
    return DenseDistribution(target_probs=logits.softmax(-1).float())


def argmax_distribution(rows: int, vocab: int, seed: int = 3) -> SparseDistribution:
    """At temperature 0: all mass on one id."""
    ids = normal(rows, vocab, seed=seed).argmax(-1, keepdim=True)
    return SparseDistribution(ids=ids, shares=torch.ones(rows, 1))


@dataclass(frozen=True)
class GivenRows:
    """A teacher's rows that were made beforehand."""

    whole: TargetDistribution

    def distribution(self, rows: slice) -> TargetDistribution:
        distribution = self.whole
        if isinstance(distribution, SparseDistribution):
            return SparseDistribution(ids=distribution.ids[rows], shares=distribution.shares[rows])
        return DenseDistribution(target_probs=distribution.target_probs[rows])
