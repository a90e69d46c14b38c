"""Attention over packed rows and a KV store, as an attention function of transformers.

What differs between passes (where rows are written, which keys they see) is worked out once per
pass, and once per window where layers differ in theirs; a layer then only copies its keys and
values into the store and attends, block by block. The query heads that share a key/value head are
folded into the row dimension, so keys and values are read once, not repeated.

Layers with a sliding window read the keys inside it only. The store keeps the older ones all the
same: what such a layer could save in memory it does not save yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface

from forerun.models.base import Span
from forerun.models.kv_store import ContiguousKVStore
from forerun.models.masks import Biases, Piece, pieces_of

__all__ = [
    "ATTENTION_NAME",
    "AttentionPass",
    "attend",
    "attend_blocks",
    "packed_attention",
    "plan_pass",
    "register",
]

ATTENTION_NAME = "forerun"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Write:
    """The places in the store for the keys and values of one sequence's rows.

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
    """Rows of one sequence whose attention is computed together.

    Attributes:
        first: first row in the pass.
        num_rows: rows.
        views: [1, kv_heads, num_keys, head_dim]; keys of layer l at 2l, values at 2l + 1; the last
            are the rows' own.
        bias: [groups * num_rows, num_keys], 0 where seen and -inf where not; None: all seen.
    """

    first: int
    num_rows: int
    views: tuple[Tensor, ...]
    bias: Tensor | None


class AttentionPass:
    """The plan of a pass for attention, shared by all layers with the same window.

    Args:
        writes: where keys and values go.
        pieces: rows attending together.
        store: where the keys and values before them are.
        num_groups: query heads per key/value head.
    """

    def __init__(
        self,
        *,
        writes: tuple[Write, ...],
        pieces: tuple[Piece, ...],
        store: ContiguousKVStore,
        num_groups: int,
    ) -> None:
        self.writes = writes
        self.pieces = pieces
        self._store = store
        self._num_groups = num_groups
        self._blocks: dict[int | None, tuple[Block, ...]] = {}

    def write(
        self,
        index: int,
        key: Float[Tensor, "1 kv_heads rows head_dim"],
        value: Float[Tensor, "1 kv_heads rows head_dim"],
    ) -> None:
        """Store the keys and values of layer `index`."""
        for write in self.writes:
            write.views[2 * index].copy_(key.narrow(2, write.first, write.num_rows))
            write.views[2 * index + 1].copy_(value.narrow(2, write.first, write.num_rows))

    def blocks(self, window: int | None) -> tuple[Block, ...]:
        """Return the blocks for layers that see the last `window` positions (None: all).

        Worked out when the first of them asks: what a layer hands to its attention function is the
        only statement of its window that cannot be misread.
        """
        if window not in self._blocks:
            biases = Biases(self.pieces, self._num_groups, window, like=self.writes[0].views[0])
            self._blocks[window] = tuple(
                Block(
                    first=piece.first,
                    num_rows=piece.num_rows,
                    views=self._store.window(
                        piece.slot, piece.num_keys - piece.num_seen(window), piece.num_keys
                    ),
                    bias=biases.of(piece),
                )
                for piece in self.pieces
            )
        return self._blocks[window]


@runtime_checkable
class AttentionLayer(Protocol):
    """The attribute that is read from transformers' attention modules."""

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
    sliding_window: int | None = None,
    **_: object,  # transformers' calling convention: dropout, position_ids, use_cache and others
) -> tuple[Float[Tensor, "1 rows heads head_dim"], None]:
    """Store this layer's keys and values, then attend.

    Returns:
        The heads' outputs, and no attention weights.
    """
    attention_pass.write(module.layer_idx, key, value)
    blocks = attention_pass.blocks(sliding_window)
    return attend_blocks(module.layer_idx, query, blocks, scaling).flatten(2, 3), None


def attend_blocks(
    index: int,
    query: Float[Tensor, "1 heads rows head_dim"],
    blocks: Sequence[Block],
    scaling: float,
) -> Float[Tensor, "1 rows kv_heads groups head_dim"]:
    """Compute the attention of all blocks in layer `index`, in row order."""
    outputs = [
        attend(
            query.narrow(2, block.first, block.num_rows),
            block.views[2 * index],
            block.views[2 * index + 1],
            block.bias,
            scaling,
        )
        for block in blocks
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
    """Register `packed_attention` with transformers under ATTENTION_NAME.

    No mask function goes with it, so transformers builds no mask either.
    """
    AttentionInterface.register(ATTENTION_NAME, packed_attention)


def plan_pass(spans: Sequence[Span], store: ContiguousKVStore, num_groups: int) -> AttentionPass:
    """Stage the rows of a pass and cut them into blocks.

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
    return AttentionPass(
        writes=tuple(writes), pieces=tuple(pieces), store=store, num_groups=num_groups
    )
