"""Outputs of finished requests, kept for later ones of the same scope."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from forerun.drafters.suffix.automaton import SEPARATOR, SuffixAutomaton

__all__ = ["OutputStore"]

SHELVES = 2
"""Per scope: one that is filled, and the last one that was."""


class OutputStore:
    """At most `max_tokens` tokens in all; the scopes that were idle longest lose theirs first.

    An automaton cannot forget, so a scope's texts are in two: when the younger is full, the older
    is dropped.

    Args:
        max_tokens: over all scopes, separators included.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._shelves: OrderedDict[str, list[SuffixAutomaton]] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """What is kept, over all scopes."""
        return sum(s.num_tokens for shelves in self._shelves.values() for s in shelves)

    def texts_of(self, scope: str) -> tuple[SuffixAutomaton, ...]:
        """What a scope's next request may draw on, the latest first."""
        if scope not in self._shelves:
            return ()
        self._shelves.move_to_end(scope)
        return tuple(self._shelves[scope])

    def add(self, scope: str, tokens: Sequence[int]) -> None:
        """Keep the output of a finished request, or as much of its end as there is room for."""
        room = self.max_tokens // SHELVES
        kept = tokens[max(0, len(tokens) - room + 1) :]
        if not kept or room < 1:
            return
        shelves = self._shelves.setdefault(scope, [SuffixAutomaton()])
        self._shelves.move_to_end(scope)
        if shelves[0].num_tokens + len(kept) + 1 > room:
            shelves.insert(0, SuffixAutomaton())
            del shelves[SHELVES:]
        for token in (*kept, SEPARATOR):
            shelves[0].append(token)
        while self.num_tokens > self.max_tokens:
            self._shelves.popitem(last=False)
