"""The best of several arms, chosen and scored on different blocks.

The fastest of several arms owes part of its lead to luck. Chosen on one half of the blocks and
scored on the other, luck does not carry over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.bench.compare import Block
from forerun.bench.config import LEAST_BLOCKS
from forerun.bench.summary import ArmSummary, best_arm, measurable, summarise

__all__ = ["BestOfSeveral", "best_of_several"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOfSeveral:
    """The winner of one half of the blocks.

    Attributes:
        num_candidates: arms it was chosen from.
        num_chosen_on: blocks that chose it.
        summary: its figures on the other blocks.
    """

    num_candidates: int
    num_chosen_on: int
    summary: ArmSummary

    def to_dict(self) -> dict[str, object]:
        """As JSON wants it."""
        return {
            "num_candidates": self.num_candidates,
            "num_chosen_on": self.num_chosen_on,
            "scored": self.summary.to_dict(),
        }


def best_of_several(blocks: Sequence[Block]) -> BestOfSeveral | None:
    """Choose among all arms but the first on every other block, score on the rest.

    Returns:
        None where there is no choice, or too few blocks for both halves.
    """
    blocks = measurable(blocks)
    chosen_on, scored_on = blocks[0::2], blocks[1::2]
    if len(scored_on) < LEAST_BLOCKS or len(blocks[0]) < 3:
        return None
    winner = best_arm([block[1:] for block in chosen_on])
    pairs = [(block[0], next(m for m in block if m.arm.name == winner.name)) for block in scored_on]
    return BestOfSeveral(
        num_candidates=len(blocks[0]) - 1,
        num_chosen_on=len(chosen_on),
        summary=summarise(pairs)[1],
    )
