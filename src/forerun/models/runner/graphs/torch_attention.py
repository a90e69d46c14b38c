"""Attention over a rectangle of rows, in torch operations.

Keys and values are copied out of the store first, which doubles the traffic of long contexts; the
Triton kernels read them where they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from forerun.models.attention import attend
from forerun.models.decoder import Decoder, LayerWeights
from forerun.models.kv_store import ContiguousKVStore
from forerun.models.runner.graphs.layers import Rotation, heads_of, rotation_at
from forerun.models.runner.graphs.rectangle import Rows

__all__ = ["TorchAttention", "torch_attention"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchAttention:
    """An `Attend` over a rectangle.

    Attributes:
        decoder: sizes and constants.
        store: where keys and values are.
        rows: the rectangle.
        rotation: of every row.
        places: where each row's heads lie in a layer of the store, counted in heads.
        unwritten: keys past each sequence's own.
        bias: 0 where a row, heads of a group folded in, sees a key, -inf where not.
    """

    decoder: Decoder
    store: ContiguousKVStore
    rows: Rows
    rotation: Rotation
    places: Int64[Tensor, " written_heads"]
    unwritten: Bool[Tensor, "sequences 1 keys 1"]
    bias: Float[Tensor, "sequences 1 folded keys"]

    def __call__(
        self, index: int, layer: LayerWeights, qkv: Float[Tensor, "rows qkv_rows"]
    ) -> Float[Tensor, "rows query_rows"]:
        """Rotate, store the keys and values of layer `index`, attend."""
        query, key, value = heads_of(self.decoder, layer, qkv, self.rotation)
        keys, values = self.store.layer(index)
        for stored, new in ((keys, key), (values, value)):
            stored.view(-1, new.shape[-1]).index_copy_(0, self.places, new.flatten(0, 1))
        bucket = self.rows.bucket
        queries = query.view(bucket.num_sequences, bucket.num_rows, *query.shape[1:])
        scaling = self.decoder.architecture.head_dim**-0.5
        own = (self.own(keys), self.own(values))
        return attend(queries.transpose(1, 2), *own, self.bias, scaling).reshape(len(qkv), -1)

    def own(
        self, stored: Float[Tensor, "slots kv_heads width head_dim"]
    ) -> Float[Tensor, "sequences kv_heads keys head_dim"]:
        """Copy the sequences' keys or values, with 0 for rows that are not theirs."""
        cut = stored.narrow(2, 0, self.rows.bucket.num_keys)
        return cut.index_select(0, self.rows.slot).masked_fill_(self.unwritten, 0)


def torch_attention(decoder: Decoder, store: ContiguousKVStore, rows: Rows) -> TorchAttention:
    """Compute what all layers of a pass share."""
    sizes = decoder.architecture
    keys = torch.arange(rows.bucket.num_keys, device=rows.slot.device)
    seen = visible_keys(rows, keys).repeat(1, sizes.num_heads // sizes.num_kv_heads, 1)
    bias = torch.zeros_like(seen, dtype=store.geometry.dtype).masked_fill_(~seen, float("-inf"))
    return TorchAttention(
        decoder=decoder,
        store=store,
        rows=rows,
        rotation=rotation_at(decoder, rows.positions.flatten()),
        places=written_places(store, rows),
        unwritten=(keys >= rows.end[:, None])[:, None, :, None],
        bias=bias[:, None],
    )


def visible_keys(rows: Rows, keys: Int64[Tensor, " keys"]) -> Bool[Tensor, "sequences rows keys"]:
    """Return which keys each row sees: those before its sequence, then those of its bits."""
    offsets = keys - rows.start[:, None]
    bits = rows.visible[:, :, None] >> offsets.clamp(0, 63)[:, None]
    own = (offsets >= 0) & (keys < rows.end[:, None])
    return torch.where(own[:, None], bits & 1 != 0, (offsets < 0)[:, None])


def written_places(store: ContiguousKVStore, rows: Rows) -> Int64[Tensor, " written_heads"]:
    """Return the index of every row's heads in a layer with flattened dimensions."""
    _, _, num_kv_heads, width, _ = store.geometry.shape
    heads = torch.arange(num_kv_heads, device=rows.slot.device)
    first = rows.slot[:, None, None] * num_kv_heads + heads
    return (first * width + rows.index[:, :, None]).flatten()
