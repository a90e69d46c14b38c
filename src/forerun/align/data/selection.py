"""Chooses the held-out prompts, and mixes the sources of text in the configured shares.

Shuffling needs no state: a balanced Feistel network permutes the numbers of an even number of bits
for any round function. Numbers outside the range pass through it again until one falls inside,
which keeps it a permutation of the range ("cycle walking", Black and Rogaway 2002).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from forerun.align.data.prompts import PromptRecord
from forerun.align.data.sample import Sample, Source
from forerun.errors import InvalidRequest
from forerun.theory.splitmix import INCREMENT, finalise

__all__ = ["is_held_out", "mix", "permuted", "shares_of", "split"]

HASH_BITS = 64


def is_held_out(prompt_hash: str, held_out_share: float) -> bool:
    """Return whether a prompt is held out: its hash, as a number in [0, 1), is below the share.

    So a prompt stays on its side whatever else the data holds, and whatever is done to make its
    responses; a larger share adds prompts to those held out and takes none away.
    """
    return int(prompt_hash, 16) < held_out_share * 2.0**HASH_BITS


def split(
    prompts: Iterable[PromptRecord], held_out_share: float
) -> tuple[list[PromptRecord], list[PromptRecord]]:
    """Split prompts into training and held-out prompts, without changing their order.

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
            f"all {len(held_out)} prompts are held out: give more prompts, or lower the held-out "
            "share (--held-out-share)"
        )
    if held_out_share and not held_out:
        raise InvalidRequest(
            f"none of {len(train)} prompts is held out: give more prompts, raise the held-out "
            "share (--held-out-share), or name a file of prompts to judge with (--held-out)"
        )
    return train, held_out


def shares_of(*, on_policy_share: float, fixed_share: float) -> dict[Source, float]:
    """Return the share of each source of text; the remainder is written by the target.

    Raises:
        InvalidRequest: a share is negative, or together they are more than 1.
    """
    shares: dict[Source, float] = {"draft": on_policy_share, "fixed": fixed_share}
    if min(shares.values()) < 0.0 or sum(shares.values()) > 1.0:
        raise InvalidRequest(
            f"on_policy_share is {on_policy_share}, fixed_share {fixed_share}; they must not be "
            "negative, nor more than 1 together"
        )
    shares["target"] = 1.0 - sum(shares.values())
    return {source: share for source, share in shares.items() if share > 0.0}


def mix(samples: Sequence[Sample], shares: Mapping[Source, float], *, seed: int) -> list[Sample]:
    """Select as many samples as the shares allow, without using a sample twice.

    The source that runs out first decides how many. Of the others a shuffled selection is taken up
    to its share, so that every share is met to within the length of a sample. Sources without a
    share are left out.

    Args:
        samples: of all sources.
        shares: of the learned tokens, adding up to 1.
        seed: of the selection.

    Raises:
        InvalidRequest: there is no sample of a source that has a share.
    """
    groups = {source: [s for s in samples if s.source == source] for source in shares}
    learned = {source: sum(s.num_learned for s in group) for source, group in groups.items()}
    for source, num_learned in learned.items():
        if num_learned == 0:
            raise InvalidRequest(
                f"{shares[source]:.0%} of the tokens are to come from source {source!r}, which has "
                "none: set its share to 0, or give more prompts, for 'fixed' with responses"
            )
    num_all = min(learned[source] / share for source, share in shares.items())
    return [
        sample
        for source, share in shares.items()
        for sample in selection(groups[source], share * num_all, seed)
    ]


def selection(samples: Sequence[Sample], num_learned: float, seed: int) -> Iterator[Sample]:
    """Yield shuffled samples until they contain at least the given number of learned tokens."""
    num_taken = 0
    for index in range(len(samples)):
        # Half a token of slack: shares of a whole are met exactly, not short of rounding.
        if num_taken + 0.5 > num_learned:
            return
        sample = samples[permuted(index, len(samples), seed)]
        num_taken += sample.num_learned
        yield sample


NUM_ROUNDS = 6


def permuted(index: int, size: int, key: int) -> int:
    """Return the image of an index under the permutation that `key` selects.

    Args:
        index: 0 to size - 1.
        size: of the range.
        key: any integer; another key, another permutation.
    """
    half_bits = max((size - 1).bit_length() + 1, 2) // 2
    while True:
        index = shuffled_bits(index, half_bits, key)
        if index < size:
            return index


def shuffled_bits(number: int, half_bits: int, key: int) -> int:
    """Apply the Feistel network once to a number of twice `half_bits` bits."""
    mask = (1 << half_bits) - 1
    left, right = number >> half_bits, number & mask
    for number_of_round in range(1, NUM_ROUNDS + 1):
        mixed = finalise(finalise(key + number_of_round * INCREMENT) ^ right)
        left, right = right, left ^ mixed & mask
    return left << half_bits | right
