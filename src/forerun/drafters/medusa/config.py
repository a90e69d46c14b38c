"""Sizes of Medusa heads; torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import InvalidModel

__all__ = ["MedusaConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """Sizes of Medusa heads on a frozen target.

    Attributes:
        hidden_size: width of the target's residual stream.
        vocab_size: width of the target's logits.
        num_heads: tokens that can be drafted; head k, from 0, predicts the token k + 2 after the
            row it reads.
        num_blocks: residual blocks per head.
        own_heads: every head has an output matrix of its own; otherwise all use the target's.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_blocks: int = 1
    own_heads: bool = False

    def __post_init__(self) -> None:
        """Refuse a checkpoint without heads.

        Raises:
            InvalidModel: a number is below 1.
        """
        if min(self.hidden_size, self.vocab_size, self.num_heads, self.num_blocks) < 1:
            raise InvalidModel(f"Medusa heads need positive sizes, not {self}")
