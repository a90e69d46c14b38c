"""Attention masks of a pass: its rows are cut into blocks with one additive mask each.

A row sees itself and what came before it: committed keys, the chain, in a tree its ancestors. In
layers with a sliding window it sees of these only the last `window` positions, its own included;
positions, not places in the store, for in a tree these differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from forerun.models.base import Span
from forerun.theory.tree import NO_TREE, TokenTree

__all__ = ["Biases", "Piece", "hidden_rows", "pieces_of"]

# Long chains attend in blocks: the mask stays small, and keys behind a block are not even read.
BLOCK_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows of one sequence whose attention is computed together.

    Attributes:
        first: first row in the pass.
        num_rows: rows; they are the last of the keys.
        slot: whose keys.
        num_keys: keys [0, num_keys) precede the rows or are theirs.
        tree: shape of the last rows if they are no chain.
        causal: whether a row sees only what comes before it; if not, all rows see each other.
    """

    first: int
    num_rows: int
    slot: int
    num_keys: int
    tree: TokenTree | None = None
    causal: bool = True

    def num_seen(self, window: int | None) -> int:
        """Return how many of the last keys contain all keys that the rows see."""
        if window is None:
            return self.num_keys
        return min(self.num_keys, window - 1 + self.num_rows)


def pieces_of(span: Span, first: int) -> Iterator[Piece]:
    """Cut a span into blocks: its chain by BLOCK_ROWS, a tree together with the chain's last block.

    Args:
        span: rows of one sequence.
        first: their first row in the pass.
    """
    if not span.causal:
        num_rows, num_keys = span.num_rows, span.start + span.num_rows
        yield Piece(first=first, num_rows=num_rows, slot=span.slot, num_keys=num_keys, causal=False)
        return
    tree = None if span.tree.is_chain else span.tree
    num_chain = span.num_rows if tree is None else span.num_chain
    for start in range(0, num_chain, BLOCK_ROWS):
        is_last = start + BLOCK_ROWS >= num_chain
        end = span.num_rows if is_last else start + BLOCK_ROWS
        yield Piece(
            first=first + start,
            num_rows=end - start,
            slot=span.slot,
            num_keys=span.start + end,
            tree=tree if is_last else None,
        )


class Biases:
    """Additive attention masks of one pass, for the layers with one attention window.

    Chain blocks with equally many rows differ only in how many keys precede them, and how far these
    lie back does not depend on it: they share one mask, cut to length from the left.

    Args:
        pieces: the blocks of the pass.
        num_groups: query heads per key/value head.
        window: positions a row sees, None for all.
        like: a tensor of the dtype and on the device wanted.
    """

    def __init__(
        self, pieces: Sequence[Piece], num_groups: int, window: int | None, like: Tensor
    ) -> None:
        self.num_groups = num_groups
        self.window = window
        self.like = like
        self.widest: dict[int, int] = {}
        for piece in pieces:
            if piece.tree is None and piece.causal:
                widest = max(piece.num_seen(window), self.widest.get(piece.num_rows, 0))
                self.widest[piece.num_rows] = widest
        self.chains: dict[int, Tensor] = {}

    def of(self, piece: Piece) -> Float[Tensor, "folded keys"] | None:
        """Return the mask over the last `num_seen` keys of a block, or None if all are seen."""
        if piece.num_rows == 1 or (not piece.causal and self.window is None):
            return None
        num_seen = piece.num_seen(self.window)
        if not piece.causal:
            return self._mask(piece.num_rows, num_seen, causal=False)
        if piece.tree is not None:
            return self._mask(piece.num_rows, num_seen, piece.tree)
        if piece.num_rows not in self.chains:
            self.chains[piece.num_rows] = self._mask(piece.num_rows, self.widest[piece.num_rows])
        widest = self.chains[piece.num_rows]
        return widest[:, widest.shape[1] - num_seen :]

    def _mask(
        self,
        num_rows: int,
        num_keys: int,
        tree: TokenTree | None = None,
        *,
        causal: bool = True,
    ) -> Float[Tensor, "folded keys"]:
        """Build a mask: 0 for keys that are seen, -inf for others (the last are their own)."""
        device = self.like.device
        bias = self.like.new_zeros((self.num_groups, num_rows, num_keys))
        if causal:
            hidden = hidden_rows(num_rows, tree).to(device)
            bias[:, :, num_keys - num_rows :].masked_fill_(hidden, -torch.inf)
        if self.window is not None:
            far = far_keys(num_rows, num_keys, tree or NO_TREE, self.window)
            bias.masked_fill_(far.to(device), -torch.inf)
        return bias.view(-1, num_keys)


def hidden_rows(num_rows: int, tree: TokenTree | None = None) -> Bool[Tensor, "rows rows"]:
    """Which rows of a block each row must not see: later ones; in the tree, all but ancestors."""
    hidden = torch.ones(num_rows, num_rows, dtype=torch.bool).triu_(1)
    if tree is not None:
        num_nodes = len(tree.parents)
        # A buffer of bytes: a tensor from nested tuples costs an object per element.
        seen = bytearray().join(map(bytes, tree.ancestor_mask()))
        ancestors = torch.frombuffer(seen, dtype=torch.bool).view(num_nodes, num_nodes)
        hidden[num_rows - num_nodes :, num_rows - num_nodes :] = ~ancestors
    return hidden


def far_keys(
    num_rows: int, num_keys: int, tree: TokenTree, window: int
) -> Bool[Tensor, "rows keys"]:
    """Which of the last `num_keys` keys lie `window` positions or more before each row."""
    rows = positions_in(num_rows, tree)
    keys = torch.cat([torch.arange(num_rows - num_keys, 0), rows])
    return rows[:, None] - keys >= window


def positions_in(num_rows: int, tree: TokenTree) -> Int64[Tensor, " rows"]:
    """Position of every row of a block, counted from its first; nodes of equal depth share one."""
    num_chain = num_rows - len(tree.parents)
    depths = torch.tensor(tree.depths, dtype=torch.int64)
    return torch.cat([torch.arange(num_chain), num_chain - 1 + depths])
