"""Draft logits and target laws for tests of objectives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.align.law import DenseLaw, SparseLaw, TargetLaw


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.empty(*shape, dtype=torch.float64).normal_(generator=generator)


def dense_law(rows: int, vocab: int, seed: int = 1) -> DenseLaw:
    """Every token possible, some a millionfold likelier than others."""
    probs = normal(rows, vocab, seed=seed, scale=3).softmax(-1)
    return DenseLaw(target_probs=probs.float())


def truncated_law(rows: int, vocab: int, seed: int = 2) -> DenseLaw:
    """As left by top_k: half of the tokens impossible."""
    logits = normal(rows, vocab, seed=seed, scale=2)
    logits[logits < logits.median(-1, keepdim=True).values] = -torch.inf
    return DenseLaw(target_probs=logits.softmax(-1).float())


def argmax_law(rows: int, vocab: int, seed: int = 3) -> SparseLaw:
    """At temperature 0: all mass on one id."""
    ids = normal(rows, vocab, seed=seed).argmax(-1, keepdim=True)
    return SparseLaw(ids=ids, shares=torch.ones(rows, 1))


@dataclass(frozen=True)
class GivenRows:
    """A teacher's rows that were made beforehand."""

    whole: TargetLaw

    def __len__(self) -> int:
        law = self.whole
        return len(law.ids if isinstance(law, SparseLaw) else law.target_probs)

    def law(self, rows: slice) -> TargetLaw:
        law = self.whole
        if isinstance(law, SparseLaw):
            return SparseLaw(ids=law.ids[rows], shares=law.shares[rows])
        return DenseLaw(target_probs=law.target_probs[rows])
