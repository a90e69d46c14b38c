"""What a seed varies: reproducible draws for the set-up of an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from forerun.theory.splitmix import INCREMENT, MASK, finalise

__all__ = ["Dice"]

T = TypeVar("T")
BITS = 53


class Dice:
    """Draws that are a function of a seed and a name.

    Args:
        seed: of the run.
        name: of the experiment, so that no two vary alike.
    """

    def __init__(self, seed: int, name: str) -> None:
        mixed = finalise(seed + 1)
        for byte in name.encode():
            mixed = finalise(mixed + INCREMENT * (byte + 1))
        self._state = mixed

    def bits(self) -> int:
        """The next 64 bits."""
        self._state = (self._state + INCREMENT) & MASK
        return finalise(self._state)

    def uniform(self, low: float, high: float) -> float:
        """A number from `low` up to, not including, `high`."""
        return low + (high - low) * (self.bits() >> 64 - BITS) / (1 << BITS)

    def integer(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        return low + self.bits() % (high - low + 1)

    def choice(self, values: Sequence[T]) -> T:
        """One of the values."""
        return values[self.integer(0, len(values) - 1)]

    def sample(self, values: Sequence[T], count: int) -> list[T]:
        """So many different ones, in the order of the draw; all, if there are fewer."""
        left = list(values)
        return [left.pop(self.integer(0, len(left) - 1)) for _ in range(min(count, len(left)))]
