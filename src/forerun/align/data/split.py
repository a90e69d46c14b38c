"""Which prompts are learned from and which are kept for judging."""

from __future__ import annotations

from collections.abc import Iterable

from forerun.align.data.prompts import PromptRecord
from forerun.errors import InvalidRequest

__all__ = ["is_held_out", "split"]

HASH_BITS = 64


def is_held_out(prompt_hash: str, held_out_share: float) -> bool:
    """Whether a prompt is kept for judging: its hash, as a number from 0 to 1, is below the share.

    So a prompt stays on its side whatever else the data holds, and whatever is done to make its
    responses; a larger share adds prompts to those held out and takes none away.
    """
    return int(prompt_hash, 16) < held_out_share * 2.0**HASH_BITS


def split(
    prompts: Iterable[PromptRecord], held_out_share: float
) -> tuple[list[PromptRecord], list[PromptRecord]]:
    """Prompts to train on and prompts held out, each in their order.

    Raises:
        InvalidRequest: the share is no share, or one side is empty.
    """
    if not 0.0 <= held_out_share < 1.0:
        raise InvalidRequest(f"held_out_share is {held_out_share}; it must be from 0 to below 1")
    sides: tuple[list[PromptRecord], list[PromptRecord]] = ([], [])
    for prompt in prompts:
        sides[is_held_out(prompt.prompt_hash, held_out_share)].append(prompt)
    train, held_out = sides
    if not train:
        raise InvalidRequest(
            f"all {len(held_out)} prompts are held out: lower held_out_share or give more prompts"
        )
    if held_out_share and not held_out:
        raise InvalidRequest(
            f"none of {len(train)} prompts is held out: raise held_out_share or give more prompts"
        )
    return train, held_out
