"""What a teacher says about a row: the whole law, or ids that stand for it."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float32, Int64
from torch import Tensor

__all__ = ["DenseLaw", "SparseLaw", "TargetLaw", "dense_probs"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseLaw:
    """The target's law over the vocabulary, deployed temperature and truncation applied."""

    target_probs: Float32[Tensor, "rows vocab"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SparseLaw:
    """Mass on some ids of each row: shares of drawn ids, the one argmax, or the k most likely.

    Attributes:
        ids: distinct within a row, except at share 0 (padding).
        shares: of each id; sums to 1 except where a truncation dropped mass.
    """

    ids: Int64[Tensor, "rows some"]
    shares: Float32[Tensor, "rows some"]


TargetLaw = DenseLaw | SparseLaw


def dense_probs(law: TargetLaw, vocab_size: int) -> Float32[Tensor, "rows vocab"]:
    """The law as one probability per token: nothing where a sparse law names no id."""
    if isinstance(law, DenseLaw):
        return law.target_probs
    empty = law.shares.new_zeros(len(law.ids), vocab_size)
    return empty.scatter_add_(1, law.ids, law.shares)
