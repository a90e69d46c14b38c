"""Triton kernels launched for a rectangle of rows: attention, norms, gates and rotation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from forerun.models.decoder import Decoder, LayerWeights
from forerun.models.kv_store import ContiguousKVStore
from forerun.models.runner.graphs.layers import Elementwise, Rotation, compute_rotation
from forerun.models.runner.graphs.rectangle import Rows
from forerun.models.runner.graphs.triton_kernels import (
    attend_kernel,
    combine_kernel,
    gate_kernel,
    norm_kernel,
    rotate_kernel,
)

# Keys attended to by one program: fewest, and what keeps programs few in long contexts.
MIN_CHUNK, MAX_CHUNKS = 256, 64
# Keys it reads at once, and the bytes of them that leave room for two such blocks on any device.
MIN_BLOCK_KEYS, MAX_BLOCK_KEYS, BLOCK_BYTES = 16, 64, 64 * 128 * 2
# Rows of a tile: at least what the matrix units take, at most what leaves registers for values.
MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 16, 64
BLOCK_CHUNKS = 16
GATE_BLOCK = 1024


class TritonElementwise(Elementwise):
    """The operations between two matrix products, one kernel launch each."""

    def add_norm(
        self,
        residual: Float[Tensor, "rows hidden"],
        update: Float[Tensor, "rows hidden"],
        weight: Float[Tensor, " hidden"],
        eps: float,
    ) -> tuple[Float[Tensor, "rows hidden"], Float[Tensor, "rows hidden"]]:
        total, normed = torch.empty_like(residual), torch.empty_like(residual)
        _launch_norm((residual, update, weight, total, normed), eps, adds=True)
        return total, normed

    def norm(
        self, rows: Float[Tensor, "rows hidden"], weight: Float[Tensor, " hidden"], eps: float
    ) -> Float[Tensor, "rows hidden"]:
        normed = torch.empty_like(rows)
        _launch_norm((rows, rows, weight, normed, normed), eps, adds=False)
        return normed

    def gate(
        self, gate_up: Float[Tensor, "rows gate_up_rows"]
    ) -> Float[Tensor, "rows intermediate"]:
        num_rows, num_columns = len(gate_up), gate_up.shape[1] // 2
        gated = gate_up.new_empty((num_rows, num_columns))
        grid = (num_rows, triton.cdiv(num_columns, GATE_BLOCK))
        gate_kernel[grid](gate_up, gated, num_columns=num_columns, BLOCK=GATE_BLOCK)
        return gated


def _launch_norm(tensors: tuple[Tensor, ...], eps: float, *, adds: bool) -> None:
    num_rows, num_columns = tensors[0].shape
    block = triton.next_power_of_2(num_columns)
    norm_kernel[(num_rows,)](
        *tensors,
        eps,
        num_columns=num_columns,
        BLOCK=block,
        ADDS=adds,
        num_warps=8 if block > 2048 else 4,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TritonAttention:
    """An `Attend` over a rectangle of rows that reads keys and values in place from the store."""

    decoder: Decoder
    store: ContiguousKVStore
    rows: Rows
    rotation: Rotation

    def __call__(
        self, index: int, layer: LayerWeights, qkv: Float[Tensor, "rows qkv_rows"]
    ) -> Float[Tensor, "rows query_rows"]:
        keys, values = self.store.layer(index)
        query = self.rotate(layer, qkv, keys, values)
        return self.attend(query, keys, values)

    def rotate(
        self,
        layer: LayerWeights,
        qkv: Float[Tensor, "rows qkv_rows"],
        keys: Float[Tensor, "slots kv_heads width head_dim"],
        values: Float[Tensor, "slots kv_heads width head_dim"],
    ) -> Float[Tensor, "rows query_rows"]:
        """Rotate queries and keys; keys and values go into the store."""
        sizes, rows = self.decoder.architecture, self.rows
        query = qkv.new_empty((len(qkv), sizes.num_heads * sizes.head_dim))
        norms = (layer.query_norm, layer.key_norm)
        rotate_kernel[(len(qkv), sizes.num_heads + 2 * sizes.num_kv_heads)](
            qkv,
            *(qkv if norm is None else norm for norm in norms),
            *self.rotation,
            rows.slot,
            rows.index,
            query,
            keys,
            values,
            self.decoder.norm_eps,
            keys.shape[2],
            NUM_ROWS=rows.bucket.num_rows,
            NUM_HEADS=sizes.num_heads,
            NUM_KV_HEADS=sizes.num_kv_heads,
            HEAD_DIM=sizes.head_dim,
            BLOCK=triton.next_power_of_2(sizes.head_dim // 2),
            NORMS=None not in norms,
            num_warps=1,
        )
        return query

    def attend(
        self,
        query: Float[Tensor, "rows query_rows"],
        keys: Float[Tensor, "slots kv_heads width head_dim"],
        values: Float[Tensor, "slots kv_heads width head_dim"],
    ) -> Float[Tensor, "rows query_rows"]:
        """Attend to every chunk of keys separately, then combine the chunks of each row."""
        sizes, rows, bucket = self.decoder.architecture, self.rows, self.rows.bucket
        groups, num_kv_heads = sizes.num_heads // sizes.num_kv_heads, sizes.num_kv_heads
        block_rows, num_tiles = _count_tiles(groups * bucket.num_rows)
        chunk = choose_chunk(bucket.num_keys)
        num_chunks = triton.cdiv(bucket.num_keys, chunk)
        shape = (bucket.num_sequences, num_kv_heads, num_chunks, num_tiles * block_rows)
        block_d = max(16, triton.next_power_of_2(sizes.head_dim))
        partial = query.new_empty((*shape, block_d), dtype=torch.float32)
        peaks = query.new_empty(shape, dtype=torch.float32)
        masses = torch.empty_like(peaks)
        block_keys = BLOCK_BYTES // (block_d * keys.itemsize)
        constants = {
            "NUM_ROWS": bucket.num_rows,
            "GROUPS": groups,
            "NUM_KV_HEADS": num_kv_heads,
            "NUM_CHUNKS": num_chunks,
            "HEAD_DIM": sizes.head_dim,
            "BLOCK_D": block_d,
            "CHUNK": chunk,
        }
        attend_kernel[(bucket.num_sequences * num_tiles, num_kv_heads, num_chunks)](
            query,
            keys,
            values,
            rows.slot,
            rows.start,
            rows.end,
            rows.visible,
            partial,
            peaks,
            masses,
            sizes.head_dim**-0.5,
            keys.shape[2],
            **constants,
            BLOCK_ROWS=block_rows,
            BLOCK_KEYS=min(MAX_BLOCK_KEYS, max(MIN_BLOCK_KEYS, block_keys)),
            # In fp32 the matrix units' own format would lose 13 bits.
            PRECISION="ieee",
            num_stages=2,
        )
        attended = torch.empty_like(query)
        combine_kernel[(len(query), sizes.num_heads)](
            partial,
            peaks,
            masses,
            rows.end,
            attended,
            **constants,
            NUM_FOLDED=num_tiles * block_rows,
            BLOCK_CHUNKS=BLOCK_CHUNKS,
        )
        return attended


def _count_tiles(num_folded: int) -> tuple[int, int]:
    block_rows = min(MAX_BLOCK_ROWS, max(MIN_BLOCK_ROWS, triton.next_power_of_2(num_folded)))
    return block_rows, triton.cdiv(num_folded, block_rows)


def choose_chunk(num_keys: int) -> int:
    """Return the keys per attention program, a multiple of the keys that it loads at once."""
    fewest = max(MIN_CHUNK, triton.cdiv(num_keys, MAX_CHUNKS))
    return int(triton.cdiv(fewest, MAX_BLOCK_KEYS)) * MAX_BLOCK_KEYS


def triton_attention(decoder: Decoder, store: ContiguousKVStore, rows: Rows) -> TritonAttention:
    rotation = compute_rotation(decoder, rows.positions.flatten())
    return TritonAttention(decoder=decoder, store=store, rows=rows, rotation=rotation)
