from __future__ import annotations

from forerun.theory.splitmix import INCREMENT, MASK, finalise


def test_the_published_generator() -> None:
    """First outputs of SplitMix64 from state 1234567, as its reference implementation prints."""
    drawn = [finalise(1234567 + step * INCREMENT) for step in range(1, 4)]
    assert drawn == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_only_the_low_bits_count() -> None:
    assert finalise(5) == finalise(5 - (1 << 64)) == finalise(5 + (3 << 64)) <= MASK
