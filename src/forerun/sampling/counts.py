"""Counts the distinct tokens of a text for penalties.

A penalty changes the logits of tokens that occurred, so each row is given as the few places it
changes. Counts of the committed output grow by one entry per new token; a draft node adds its path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

__all__ = ["Occurrences", "TokenCounts"]

FIRST_ROOM = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Occurrences:
    """Tokens that occurred before each of some rows, with one entry per row and distinct token.

    Attributes:
        rows: row of each entry.
        tokens: its token.
        counts: how often that occurred in the output before the row; 0 for one of the prompt alone.
    """

    rows: Int64[Tensor, " entries"]
    tokens: Int64[Tensor, " entries"]
    counts: Float32[Tensor, " entries"]

    @classmethod
    def join(cls, parts: Sequence[Occurrences]) -> Occurrences:
        """Join the occurrences of several requests."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            rows=torch.cat([part.rows for part in parts]),
            tokens=torch.cat([part.tokens for part in parts]),
            counts=torch.cat([part.counts for part in parts]),
        )


class TokenCounts:
    """Distinct tokens of one sample with their counts, in compact arrays.

    Args:
        prompt_ids: tokens that count as seen though the output has none of them.
        device: where the logits are.
    """

    def __init__(self, prompt_ids: Sequence[int], device: torch.device | str = "cpu") -> None:
        self._places = {token: i for i, token in enumerate(dict.fromkeys(prompt_ids))}
        self._tokens = torch.tensor([*self._places], dtype=torch.int64, device=device)
        self._counts = torch.zeros(len(self._places), device=device)

    @property
    def tokens(self) -> Int64[Tensor, " distinct"]:
        """Distinct tokens of prompt and output, in order of their first occurrence."""
        return self._tokens[: len(self._places)]

    @property
    def counts(self) -> Float32[Tensor, " distinct"]:
        """Number of times that each of the tokens occurs in the output."""
        return self._counts[: len(self._places)]

    def add(self, token: int) -> None:
        """Count one more output token in amortised constant time."""
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            if place == len(self._tokens):
                self._tokens, self._counts = with_room(self._tokens), with_room(self._counts)
            self._tokens[place] = token
        self._counts[place] += 1

    def before_rows(self, first_row: int, paths: Sequence[Sequence[int]]) -> Occurrences:
        """Return the tokens that occurred before each of some consecutive rows.

        Takes time and memory of rows x distinct tokens, 20 bytes each.

        Args:
            first_row: number of the first row.
            paths: per row, the draft tokens between the committed text and what it predicts.
        """
        num_tokens, device = len(self._places), self._tokens.device
        found = Occurrences(
            rows=torch.arange(first_row, first_row + len(paths), device=device).repeat_interleave(
                num_tokens
            ),
            tokens=self.tokens.repeat(len(paths)),
            counts=self.counts.repeat(len(paths)),
        )
        known: list[tuple[int, int]] = []
        new: list[tuple[int, int, int]] = []
        for row, path in enumerate(paths):
            for token, times in Counter(path).items():
                if (place := self._places.get(token)) is not None:
                    known.append((row * num_tokens + place, times))
                else:
                    new.append((first_row + row, token, times))
        if known:
            more = torch.tensor(known, device=device)
            found.counts.index_add_(0, more[:, 0], more[:, 1].to(torch.float32))
        if not new:
            return found
        rows, tokens, fresh = torch.tensor(new, device=device).unbind(-1)
        drafted = Occurrences(rows=rows, tokens=tokens, counts=fresh.to(torch.float32))
        return Occurrences.join([found, drafted])


def with_room(values: Tensor) -> Tensor:
    """Return a tensor of twice the length that starts with the same values."""
    return torch.cat([values, values.new_zeros(max(FIRST_ROOM, len(values)))])
