"""Cached and pending tokens of one sequence in one model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.models.base import KVStore, RowBatch, Span
from forerun.models.slots import Prefix
from forerun.theory.tree import NO_TREE, TokenTree

__all__ = ["Context", "pack"]


class Context:
    """The committed tokens of a request, and the slot that holds their KV in one model.

    `ids` is owned by the request and only ever appended to; what this model has not cached of it is
    pending and is fed by the next pass, so neither drafters nor the step do catch-up arithmetic.

    Args:
        store: of the model.
        ids: of the sequence.
        scope: sequences of one scope share what is cached of tokens they begin with; None begins
            with nothing and shares nothing.
    """

    def __init__(self, store: KVStore, ids: list[int], scope: str | None = None) -> None:
        self.store = store
        self.ids = ids
        if scope is None:
            self.slot = store.reserve()
        else:
            self.slot = store.begin(Prefix(ids=ids, scope=scope))

    @property
    def num_cached(self) -> int:
        """Committed tokens whose KV this model holds."""
        return self.store.length(self.slot)

    @property
    def num_pending(self) -> int:
        """Committed tokens whose KV is not cached yet."""
        return len(self.ids) - self.num_cached

    def pending(self, limit: int | None = None) -> list[int]:
        """Return the next committed tokens to feed, at most `limit`."""
        start = self.num_cached
        return self.ids[start : len(self.ids) if limit is None else start + limit]

    def span(self, num_chain: int, tree: TokenTree = NO_TREE, num_staged: int = 0) -> Span:
        """Return a span of a chain and a tree after the cached and `num_staged` staged rows."""
        start = self.num_cached + num_staged
        return Span(slot=self.slot, start=start, num_chain=num_chain, tree=tree)

    def commit(self, rows: Sequence[int]) -> None:
        """Commit the given staged rows and drop all other staged rows."""
        self.store.commit(self.slot, rows)

    def close(self, num_kept: int = 0) -> None:
        """Free the slot, but keep its first `num_kept` tokens for requests with the same prefix."""
        self.store.keep(self.slot, num_kept)


def positions_of(span: Span) -> list[int]:
    """Return the absolute position of every row of a span."""
    last = span.start + span.num_chain - 1
    return [*range(span.start, last + 1), *[last + depth for depth in span.tree.depths]]


def pack(
    spans: Sequence[Span],
    tokens: Sequence[int] | Tensor,
    logit_rows: Sequence[int],
    device: torch.device,
) -> RowBatch:
    """Pack spans, their tokens and the rows to score into a RowBatch; one copy to the device.

    Tokens that are a tensor already may be on any device.
    """
    positions = [position for span in spans for position in positions_of(span)]
    ids = [] if isinstance(tokens, Tensor) else tokens
    numbers = torch.tensor([*ids, *positions, *logit_rows], dtype=torch.int64)
    sizes = [len(ids), len(positions), len(logit_rows)]
    parts = numbers.to(device, non_blocking=True).split_with_sizes(sizes)
    return RowBatch(
        tokens=tokens.to(device, non_blocking=True) if isinstance(tokens, Tensor) else parts[0],
        positions=parts[1],
        spans=tuple(spans),
        logit_rows=parts[2],
    )
