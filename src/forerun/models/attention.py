"""Attention over packed rows and a KV store, as an attention function of transformers.

What differs between passes (who writes where, who sees what) is worked out once per pass; a layer
then only copies its keys and values into the store and attends, block by block. The query heads
that share a key/value head are folded into the row dimension, so keys and values are read once, not
repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import AttentionInterface

from forerun.models.base import Span
from forerun.models.kv_store import ContiguousKVStore
from forerun.theory.tree import TokenTree

__all__ = [
    "ATTENTION_NAME",
    "AttentionPass",
    "attend",
    "attend_pass",
    "packed_attention",
    "plan_pass",
    "register",
]

ATTENTION_NAME = "forerun"

# Long chains attend in blocks: the mask stays small, and keys behind a block are not even read.
BLOCK_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Write:
    """Where the keys and values of one sequence's rows go.

    Attributes:
        first: first row in the pass.
        num_rows: rows.
        views: [1, kv_heads, num_rows, head_dim]; keys of layer l at 2l, values at 2l + 1.
    """

    first: int
    num_rows: int
    views: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Rows attending together.

    Attributes:
        first: first row in the pass.
        num_rows: rows.
        views: [1, kv_heads, num_keys, head_dim]; keys of layer l at 2l, values at 2l + 1.
        bias: [groups * num_rows, num_keys], 0 where seen and -inf where not; None: all seen.
    """

    first: int
    num_rows: int
    views: tuple[Tensor, ...]
    bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionPass:
    """All that attention needs to know of a pass; the same for every layer."""

    writes: tuple[Write, ...]
    blocks: tuple[Block, ...]


@runtime_checkable
class AttentionLayer(Protocol):
    """What is asked of transformers' attention modules."""

    layer_idx: int


def packed_attention(  # noqa: PLR0913 (transformers' signature)
    module: AttentionLayer,
    query: Float[Tensor, "1 heads rows head_dim"],
    key: Float[Tensor, "1 kv_heads rows head_dim"],
    value: Float[Tensor, "1 kv_heads rows head_dim"],
    attention_mask: None,
    *,
    scaling: float,
    attention_pass: AttentionPass,
    **_: object,  # transformers' calling convention: dropout, position_ids, use_cache and others
) -> tuple[Float[Tensor, "1 rows kv_heads groups head_dim"], None]:
    """Store this layer's keys and values, then attend.

    Returns:
        The heads' outputs, and no attention weights.
    """
    return attend_pass(module.layer_idx, query, key, value, scaling, attention_pass), None


def attend_pass(
    index: int,
    query: Float[Tensor, "1 heads rows head_dim"],
    key: Float[Tensor, "1 kv_heads rows head_dim"],
    value: Float[Tensor, "1 kv_heads rows head_dim"],
    scaling: float,
    attention_pass: AttentionPass,
) -> Float[Tensor, "1 rows kv_heads groups head_dim"]:
    """Store the keys and values of layer `index`, then attend; the heads' outputs."""
    layer = 2 * index
    for write in attention_pass.writes:
        write.views[layer].copy_(key.narrow(2, write.first, write.num_rows))
        write.views[layer + 1].copy_(value.narrow(2, write.first, write.num_rows))
    outputs = [
        attend(
            query.narrow(2, block.first, block.num_rows),
            block.views[layer],
            block.views[layer + 1],
            block.bias,
            scaling,
        )
        for block in attention_pass.blocks
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def attend(
    query: Float[Tensor, "sequences heads rows head_dim"],
    keys: Float[Tensor, "sequences kv_heads keys head_dim"],
    values: Float[Tensor, "sequences kv_heads keys head_dim"],
    bias: Float[Tensor, "*shared folded keys"] | None,
    scaling: float,
) -> Float[Tensor, "sequences rows kv_heads groups head_dim"]:
    """Scaled dot-product attention with the query heads of a group folded into the rows."""
    num_sequences, num_heads, num_rows, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    folded = query.reshape(num_sequences, num_kv_heads, -1, head_dim)
    attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=bias, scale=scaling)
    groups = num_heads // num_kv_heads
    unfolded = attended.view(num_sequences, num_kv_heads, groups, num_rows, head_dim)
    return unfolded.permute(0, 3, 1, 2, 4)


def register() -> None:
    """Make `packed_attention` known to transformers under ATTENTION_NAME.

    No mask function goes with it, so transformers builds no mask either.
    """
    AttentionInterface.register(ATTENTION_NAME, packed_attention)


def plan_pass(spans: Sequence[Span], store: ContiguousKVStore, num_groups: int) -> AttentionPass:
    """Stage the rows of a pass and work out who attends to what.

    Args:
        spans: the sequences of the pass, in row order.
        store: where keys and values go and come from.
        num_groups: query heads per key/value head.

    Raises:
        NotEnoughMemory: rows do not fit into their slot.
    """
    writes = []
    pieces: list[Piece] = []
    row = 0
    for span in spans:
        views = store.stage(span.slot, span.start, span.num_rows)
        writes.append(Write(first=row, num_rows=span.num_rows, views=views))
        pieces += pieces_of(span, row)
        row += span.num_rows
    biases = Biases(pieces, num_groups, writes[0].views[0])
    blocks = tuple(
        Block(
            first=piece.first,
            num_rows=piece.num_rows,
            views=store.window(piece.slot, 0, piece.num_keys),
            bias=biases.of(piece),
        )
        for piece in pieces
    )
    return AttentionPass(writes=tuple(writes), blocks=blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A block before it has tensors.

    Attributes:
        first: first row in the pass.
        num_rows: rows; they are the last of the keys.
        slot: whose keys.
        num_keys: keys [0, num_keys) are attended to, subject to causality and tree.
        tree: shape of the last rows if they are no chain.
    """

    first: int
    num_rows: int
    slot: int
    num_keys: int
    tree: TokenTree | None = None


def pieces_of(span: Span, first: int) -> Iterator[Piece]:
    """Cut a span into blocks: its chain by BLOCK_ROWS, a tree together with the chain's last block.

    Args:
        span: rows of one sequence.
        first: their first row in the pass.
    """
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
    """Additive masks of one pass.

    Chain blocks with equally many rows differ only in how many keys precede them, which all rows
    see: they share one mask, cut to length from the left.
    """

    def __init__(self, pieces: Sequence[Piece], num_groups: int, like: Tensor) -> None:
        self.num_groups = num_groups
        self.like = like
        self.widest: dict[int, int] = {}
        for piece in pieces:
            if piece.tree is None:
                widest = max(piece.num_keys, self.widest.get(piece.num_rows, 0))
                self.widest[piece.num_rows] = widest
        self.chains: dict[int, Tensor] = {}

    def of(self, piece: Piece) -> Float[Tensor, "folded keys"] | None:
        """The mask of one block; None when its rows see all keys."""
        if piece.num_rows == 1:
            return None
        if piece.tree is not None:
            return self._widen(hidden_rows(piece.num_rows, piece.tree), piece.num_keys)
        if piece.num_rows not in self.chains:
            hidden = hidden_rows(piece.num_rows)
            self.chains[piece.num_rows] = self._widen(hidden, self.widest[piece.num_rows])
        widest = self.chains[piece.num_rows]
        return widest[:, widest.shape[1] - piece.num_keys :]

    def _widen(
        self, hidden: Bool[Tensor, "rows rows"], num_keys: int
    ) -> Float[Tensor, "folded keys"]:
        """An additive mask over `num_keys` keys of which the last are the rows themselves."""
        num_rows = len(hidden)
        bias = self.like.new_zeros((self.num_groups, num_rows, num_keys))
        bias[:, :, num_keys - num_rows :].masked_fill_(hidden.to(bias.device), -torch.inf)
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
