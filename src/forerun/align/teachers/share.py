"""Which part of a common work is this process's, and how the others are waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["ALONE", "Share"]

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One process of several that fill a cache together, over a common disk.

    Attributes:
        index: of this process.
        number: of processes.
        wait: returns in all of them once all have called it.
    """

    index: int = 0
    number: int = 1
    wait: Callable[[], None] = lambda: None

    def of(self, parts: Sequence[Part]) -> Iterator[tuple[Part, bool]]:
        """The parts of this process, and whether it is to keep them.

        All processes get equally many, as a target whose weights are spread over them needs: where
        the parts run out, the first is done again for nothing.
        """
        for start in range(0, len(parts), self.number):
            place = start + self.index
            if place < len(parts):
                yield parts[place], True
            else:
                yield parts[0], False


ALONE = Share()
"""One process, which waits for nobody."""
