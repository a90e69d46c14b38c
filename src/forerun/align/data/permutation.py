"""Shuffling without state: the place of one index in a permutation, from a key.

A balanced Feistel network permutes the numbers of an even number of bits, whatever its round
function is. Numbers outside the range are sent through it again until one falls inside, which keeps
it a permutation of the range ("cycle walking", Black and Rogaway 2002).
"""

from __future__ import annotations

from forerun.theory.splitmix import INCREMENT, finalise

__all__ = ["permuted"]

NUM_ROUNDS = 6


def permuted(index: int, size: int, key: int) -> int:
    """Where the permutation of `key` sends an index.

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
    """One pass of the network over numbers of twice `half_bits` bits."""
    mask = (1 << half_bits) - 1
    left, right = number >> half_bits, number & mask
    for number_of_round in range(1, NUM_ROUNDS + 1):
        mixed = finalise(finalise(key + number_of_round * INCREMENT) ^ right)
        left, right = right, left ^ mixed & mask
    return left << half_bits | right
