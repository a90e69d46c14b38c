"""A finite automaton as a mask, small enough to check texts against it by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Table = Sequence[Mapping[int, int]]
"""Per state: the tokens it allows, and the state each of them leads to."""


class Automaton:
    """Begins in state 0; refuses to be told a token it does not allow."""

    def __init__(self, table: Table, vocab_size: int, state: int = 0) -> None:
        self.table = table
        self.vocab_size = vocab_size
        self.state = state

    def fork(self) -> Automaton:
        return Automaton(self.table, self.vocab_size, self.state)

    def advance(self, token: int) -> None:
        if token not in self.table[self.state]:
            raise ValueError(f"token {token} in state {self.state}")
        self.state = self.table[self.state][token]

    def allowed(self) -> Tensor:
        row = torch.zeros(self.vocab_size, dtype=torch.bool)
        row[list(self.table[self.state])] = True
        return row

    def accepts(self, text: Sequence[int]) -> bool:
        """Whether a text from the beginning is possible."""
        state = 0
        for token in text:
            if token not in self.table[state]:
                return False
            state = self.table[state][token]
        return True
