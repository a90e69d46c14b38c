"""Attention over packed rows and a KV store, as an attention function of transformers.

What differs between passes (where rows are written, which keys they see) is worked out once per
pass, and once per window where layers differ in theirs; a layer then only copies its keys and
values into the store and attends, block by block. The query heads that share a key/value head are
folded into the row dimension, so keys and values are read once, not repeated.

Layers with a sliding window read the keys inside it only. The store keeps the older ones all the
same: what such a layer could save in memory it does not save yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from forerun.errors import InvalidModel
from forerun.models.base import Span
from forerun.models.kv_store import ContiguousKVStore
from forerun.theory.tree import NO_TREE, TokenTree

# Long chains attend in blocks: the mask stays small, and keys after a block are not even read.
BLOCK_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows of one sequence whose attention is computed together.

    They are the last of the slot's first `num_keys` keys; `tree` is the shape of the last rows if
    they are no chain.
    """

    first: int
    num_rows: int
    slot: int
    num_keys: int
    tree: TokenTree | None = None

    def num_seen(self, window: int | None) -> int:
        if window is None:
            return self.num_keys
        return min(self.num_keys, window - 1 + self.num_rows)


def pieces_of(span: Span, first: int) -> Iterator[Piece]:
    """Cut a span into blocks of BLOCK_ROWS chain rows; a tree joins the last block of its chain."""
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
    """

    def __init__(
        self, pieces: Sequence[Piece], num_groups: int, window: int | None, like: Tensor
    ) -> None:
        self.num_groups = num_groups
        self.window = window
        self.like = like
        self.widest: dict[int, int] = {}
        for piece in pieces:
            if piece.tree is None:
                widest = max(piece.num_seen(window), self.widest.get(piece.num_rows, 0))
                self.widest[piece.num_rows] = widest
        self.chains: dict[int, Tensor] = {}

    def of(self, piece: Piece) -> Float[Tensor, "folded keys"] | None:
        """Return the mask over the last `num_seen` keys of a block, or None if it hides no key."""
        if piece.num_rows == 1:
            return None
        num_seen = piece.num_seen(self.window)
        if piece.tree is not None:
            return self._mask(piece.num_rows, num_seen, piece.tree)
        if piece.num_rows not in self.chains:
            self.chains[piece.num_rows] = self._mask(piece.num_rows, self.widest[piece.num_rows])
        widest = self.chains[piece.num_rows]
        return widest[:, widest.shape[1] - num_seen :]

    def _mask(
        self, num_rows: int, num_keys: int, tree: TokenTree | None = None
    ) -> Float[Tensor, "folded keys"]:
        """Build a mask: 0 at visible keys, -inf elsewhere; the last keys are the block's own."""
        device = self.like.device
        bias = self.like.new_zeros((self.num_groups, num_rows, num_keys))
        hidden = hide_rows(num_rows, tree).to(device)
        bias[:, :, num_keys - num_rows :].masked_fill_(hidden, -torch.inf)
        if self.window is not None:
            rows = list_positions(num_rows, tree or NO_TREE)
            keys = torch.cat([torch.arange(num_rows - num_keys, 0), rows])
            far = rows[:, None] - keys >= self.window
            bias.masked_fill_(far.to(device), -torch.inf)
        return bias.view(-1, num_keys)


def hide_rows(num_rows: int, tree: TokenTree | None = None) -> Bool[Tensor, "rows rows"]:
    """Return the rows hidden from each row of a block: later ones and, in a tree, non-ancestors."""
    hidden = torch.ones(num_rows, num_rows, dtype=torch.bool).triu_(1)
    if tree is not None:
        num_nodes = len(tree.parents)
        # A buffer of bytes: a tensor from nested tuples costs an object per element.
        seen = bytearray().join(map(bytes, tree.ancestor_mask()))
        ancestors = torch.frombuffer(seen, dtype=torch.bool).view(num_nodes, num_nodes)
        hidden[num_rows - num_nodes :, num_rows - num_nodes :] = ~ancestors
    return hidden


def list_positions(num_rows: int, tree: TokenTree) -> Int64[Tensor, " rows"]:
    num_chain = num_rows - len(tree.parents)
    depths = torch.tensor(tree.depths, dtype=torch.int64)
    return torch.cat([torch.arange(num_chain), num_chain - 1 + depths])


ATTENTION_NAME = "forerun"

NOT_ATTENDED = frozenset(
    "dropout position_ids use_cache cache_position is_causal logits_to_keep position_embeddings "
    "output_attentions output_hidden_states output_router_logits return_dict".split()
)
"""Further arguments that transformers passes to attention functions and that change no result."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Rows of one sequence whose attention is computed together, or which are written together.

    Attributes:
        views: [1, kv_heads, num_keys, head_dim]; keys of layer l at 2l, values at 2l + 1; the last
            are the rows' own.
        bias: [groups * num_rows, num_keys], 0 where seen and -inf where not; None: all seen.
    """

    first: int
    num_rows: int
    views: tuple[Tensor, ...]
    bias: Tensor | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class AttentionPass:
    """The plan of a pass for attention, shared by all layers with the same window.

    Attributes:
        layers: the layers that the store has places for, in this order; None: all.
    """

    writes: tuple[Block, ...]
    pieces: tuple[Piece, ...]
    store: ContiguousKVStore
    num_groups: int
    layers: Sequence[int] | None = None
    _blocks: dict[int | None, tuple[Block, ...]] = field(default_factory=dict)

    def widened(self, heads: Tensor) -> Tensor:
        """Pad heads with zeros to the width of heads in the KV store."""
        missing = self.store.geometry.head_dim - heads.shape[-1]
        return F.pad(heads, (0, missing)) if missing else heads

    def write(
        self,
        index: int,
        key: Float[Tensor, "1 kv_heads rows head_dim"],
        value: Float[Tensor, "1 kv_heads rows head_dim"],
    ) -> None:
        for write in self.writes:
            write.views[2 * index].copy_(key.narrow(2, write.first, write.num_rows))
            write.views[2 * index + 1].copy_(value.narrow(2, write.first, write.num_rows))

    def blocks(self, window: int | None) -> tuple[Block, ...]:
        """Return the blocks for layers that see the last `window` positions (None: all).

        Worked out when the first of them asks: what a layer hands to its attention function is the
        only statement of its window that cannot be misread.
        """
        if window not in self._blocks:
            biases = Biases(self.pieces, self.num_groups, window, like=self.writes[0].views[0])
            self._blocks[window] = tuple(
                Block(
                    first=piece.first,
                    num_rows=piece.num_rows,
                    views=self.store.window(
                        piece.slot, piece.num_keys - piece.num_seen(window), piece.num_keys
                    ),
                    bias=biases.of(piece),
                )
                for piece in self.pieces
            )
        return self._blocks[window]


_RUNNING: ContextVar[AttentionPass] = ContextVar("_RUNNING")
"""Not an argument: several modules of transformers hand none on to their attention."""


@contextmanager
def running(attention_pass: AttentionPass) -> Iterator[None]:
    """Let `attend_packed` attend by this plan."""
    token = _RUNNING.set(attention_pass)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def attend_packed(  # noqa: PLR0913 (transformers' signature)
    module: Any,
    query: Float[Tensor, "1 heads rows head_dim"],
    key: Float[Tensor, "1 kv_heads rows head_dim"],
    value: Float[Tensor, "1 kv_heads rows value_dim"],
    attention_mask: None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " heads"] | None = None,
    **others: object,
) -> tuple[Float[Tensor, "1 rows heads value_dim"], None]:
    """Store this layer's keys and values, then attend."""
    if unknown := [name for name in others.keys() - NOT_ATTENDED if others[name] is not None]:
        raise InvalidModel(
            f"{type(module).__name__} asks its attention for {', '.join(unknown)}, which is not "
            "supported"
        )
    attention_pass = _RUNNING.get()
    value_dim = value.shape[-1]
    query, key, value = (attention_pass.widened(part) for part in (query, key, value))
    # A layer may have fewer heads than the store has places for.
    copies = attention_pass.store.geometry.num_kv_heads // key.shape[1]
    if copies > 1:
        key, value = (part.repeat_interleave(copies, dim=1) for part in (key, value))
    index, layers = module.layer_idx, attention_pass.layers
    index = index if layers is None else layers.index(index)
    attention_pass.write(index, key, value)
    blocks = attention_pass.blocks(sliding_window)
    attended = attend_blocks(index, query, blocks, scaling, softcap, s_aux)
    return attended.flatten(2, 3)[..., :value_dim].contiguous(), None


def attend_as_falcon(
    module: Any,
    hidden_states: Float[Tensor, "1 rows width"],
    position_embeddings: tuple[Tensor, Tensor],
    **_: object,
) -> tuple[Float[Tensor, "1 rows width"], None]:
    """Compute Falcon's attention layer, which transformers cannot give another attention."""
    from transformers.models.falcon import modeling_falcon

    untyped: Any = modeling_falcon
    heads = module._split_heads(module.query_key_value(hidden_states))
    query, key, value = (part.transpose(1, 2) for part in heads)
    query, key = untyped.apply_rotary_pos_emb(query, key, *position_embeddings)
    if (copies := key.shape[1] // module.num_kv_heads) > 1:  # one per query head of a group
        key, value = key[:, ::copies], value[:, ::copies]
    attended = attend_packed(module, query, key, value, None, scaling=module.inv_norm_factor)[0]
    return module.dense(attended.flatten(2)), None


def attend_blocks(
    index: int,
    query: Float[Tensor, "1 heads rows head_dim"],
    blocks: Sequence[Block],
    scaling: float,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "1 rows kv_heads groups head_dim"]:
    """Compute the attention of all blocks in layer `index`, in row order."""
    outputs = [
        attend(
            query.narrow(2, block.first, block.num_rows),
            block.views[2 * index],
            block.views[2 * index + 1],
            block.bias,
            scaling,
            softcap,
            sinks,
        )
        for block in blocks
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def attend(  # noqa: PLR0913 (the parts of attention)
    query: Float[Tensor, "sequences heads rows head_dim"],
    keys: Float[Tensor, "sequences kv_heads keys head_dim"],
    values: Float[Tensor, "sequences kv_heads keys head_dim"],
    bias: Float[Tensor, "*shared folded keys"] | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "sequences rows kv_heads groups head_dim"]:
    """Scaled dot-product attention with the query heads of a group folded into the rows.

    Args:
        softcap: largest size of a score (Gemma 2, 2408.00118, section 2); None: no limit.
        sinks: per query head, the score of a key that has no value (gpt-oss, 2508.10925).
    """
    num_sequences, num_heads, num_rows, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    folded = query.reshape(num_sequences, num_kv_heads, -1, head_dim)
    if softcap is None and sinks is None:
        attended = F.scaled_dot_product_attention(
            folded, keys, values, attn_mask=bias, scale=scaling
        )
    else:
        attended = _attend_by_scores(folded, keys, values, bias, scaling, softcap, sinks)
    groups = num_heads // num_kv_heads
    unfolded = attended.view(num_sequences, num_kv_heads, groups, num_rows, -1)
    return unfolded.permute(0, 3, 1, 2, 4)


def _attend_by_scores(  # noqa: PLR0913 (as `attend`)
    folded: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend where scores are capped or sinks take part, which the fused function lacks."""
    scores = folded @ keys.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if sinks is None:
        return torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype) @ values
    num_kv_heads, num_folded = folded.shape[1:3]
    groups = len(sinks) // num_kv_heads
    column = sinks.view(num_kv_heads, groups, 1).expand(-1, -1, num_folded // groups)
    column = column.reshape(1, num_kv_heads, num_folded, 1).expand(len(folded), -1, -1, -1)
    weights = torch.softmax(torch.cat([scores, column], -1), -1, dtype=torch.float32)
    return weights[..., :-1].to(values.dtype) @ values


def register() -> None:
    """Register `attend_packed` with transformers, without a function that builds masks."""
    from transformers import AttentionInterface  # takes seconds; only this runner needs it

    AttentionInterface.register(ATTENTION_NAME, attend_packed)


def plan_pass(
    spans: Sequence[Span],
    store: ContiguousKVStore,
    num_groups: int,
    layers: Sequence[int] | None = None,
) -> AttentionPass:
    """Stage the rows of a pass and cut them into blocks; `layers` as for `AttentionPass`.

    Raises:
        NotEnoughMemory: rows do not fit into their slot.
    """
    writes = []
    pieces: list[Piece] = []
    row = 0
    for span in spans:
        views = store.stage(span.slot, span.start, span.num_rows)
        writes.append(Block(first=row, num_rows=span.num_rows, views=views))
        pieces += pieces_of(span, row)
        row += span.num_rows
    return AttentionPass(
        writes=tuple(writes),
        pieces=tuple(pieces),
        store=store,
        num_groups=num_groups,
        layers=layers,
    )
