"""SplitMix64, the 64-bit mixing function for all counter-based random numbers.

Source: Steele, Lea and Flood 2014.
"""

from __future__ import annotations

MASK = (1 << 64) - 1
INCREMENT = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio, odd: multiples of it spread consecutive counters."""
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)


def finalise(bits: int) -> int:
    """Apply two rounds of xor-shift and multiplication and a last xor-shift to the low 64 bits."""
    bits &= MASK
    bits = ((bits ^ bits >> SHIFTS[0]) * FACTORS[0]) & MASK
    bits = ((bits ^ bits >> SHIFTS[1]) * FACTORS[1]) & MASK
    return bits ^ bits >> SHIFTS[2]
