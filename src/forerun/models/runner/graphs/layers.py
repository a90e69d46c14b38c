"""One pass through a decoder: packed rows of tokens in, logits of requested rows out.

The weights are tensors on one device. What depends on the layout of the rows, their attention, is
passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.models.decoder import (
    Decoder,
    EndWeights,
    LayerWeights,
    ReadTensor,
    read_ends,
    read_layer,
)

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine per row and pair, fp32 [rows, head_dim / 2]."""


def _norm(
    rows: Float[Tensor, "rows hidden"], weight: Float[Tensor, " hidden"], eps: float
) -> Float[Tensor, "rows hidden"]:
    """Return the RMS norm of rows, times `weight`."""
    return F.rms_norm(rows, rows.shape[-1:], weight, eps)


def _gate(gate_up: Float[Tensor, "rows gate_up_rows"]) -> Float[Tensor, "rows intermediate"]:
    """Return SiLU of the first half of every row, times the second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def compute_rotation(decoder: Decoder, positions: Int64[Tensor, " rows"]) -> Rotation:
    angles = positions[:, None].float() * decoder.inv_freq
    return angles.cos() * decoder.rope_scale, angles.sin() * decoder.rope_scale


def split_heads(
    decoder: Decoder, layer: LayerWeights, qkv: Float[Tensor, "rows qkv_rows"], rotation: Rotation
) -> tuple[
    Float[Tensor, "rows heads head_dim"],
    Float[Tensor, "rows kv_heads head_dim"],
    Float[Tensor, "rows kv_heads head_dim"],
]:
    """Split a projection into queries, keys and values; queries and keys are normed and rotated."""
    sizes, eps = decoder.architecture, decoder.norm_eps
    bounds = (sizes.num_heads, sizes.num_heads + sizes.num_kv_heads)
    query, key, value = qkv.view(len(qkv), -1, sizes.head_dim).tensor_split(bounds, dim=1)
    if layer.query_norm is not None and layer.key_norm is not None:
        query = F.rms_norm(query, query.shape[-1:], layer.query_norm, eps)
        key = F.rms_norm(key, key.shape[-1:], layer.key_norm, eps)
    return rotated(query, rotation), rotated(key, rotation), value


def rotated(
    heads: Float[Tensor, "rows heads head_dim"], rotation: Rotation
) -> Float[Tensor, "rows heads head_dim"]:
    """Rotate every pair (i, i + head_dim / 2) by its row's angle, in fp32."""
    cosine, sine = (part[:, None] for part in rotation)
    first, second = heads.chunk(2, dim=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat(turned, dim=-1).to(heads.dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """All weights of a model."""

    decoder: Decoder
    layers: tuple[LayerWeights, ...]
    ends: EndWeights

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor once, shared tensors included."""
        parts: tuple[LayerWeights | EndWeights, ...] = (*self.layers, self.ends)
        found = [getattr(part, field.name) for part in parts for field in fields(part)]
        return tuple({id(tensor): tensor for tensor in found if tensor is not None}.values())

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors)


def allocate_features(
    weights: Weights, num_rows: int, layers: tuple[int, ...]
) -> Float[Tensor, "rows layers hidden"] | None:
    """Allocate a buffer for the features of a pass; None if no layers are requested."""
    if not layers:
        return None
    embedding = weights.ends.embedding
    with torch.inference_mode(False):  # a recording may write to it outside inference mode
        return embedding.new_empty((num_rows, len(layers), embedding.shape[1]))


def read_weights(decoder: Decoder, read: ReadTensor, device: torch.device) -> Weights:
    """Read the weights layer by layer, so that only one layer is in memory twice."""
    return Weights(
        decoder=replace(decoder, inv_freq=decoder.inv_freq.to(device)),
        layers=tuple(
            read_layer(decoder, index, read) for index in range(decoder.architecture.num_layers)
        ),
        ends=read_ends(decoder, read),
    )


Attend = Callable[
    [int, LayerWeights, Float[Tensor, "rows qkv_rows"]], Float[Tensor, "rows query_rows"]
]
"""Attention of the rows of one pass in one layer, given its index, weights and projected rows.

It rotates queries and keys, and stores keys and values of the layer.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """Inputs and attention of one pass.

    Attributes:
        feature_layers: layers whose input goes to `features`.
        features: where it goes; None when no layer is wanted.
    """

    tokens: Int64[Tensor, " rows"]
    wanted: Int64[Tensor, " wanted"]
    attend: Attend
    feature_layers: tuple[int, ...] = ()
    features: Float[Tensor, "rows layers hidden"] | None = None

    def keep_features(self, layer: int, residual: Float[Tensor, "rows hidden"]) -> None:
        """Copy the residual stream entering `layer` into the features buffer if requested."""
        if self.features is None:
            return
        for index, wanted in enumerate(self.feature_layers):
            if wanted == layer:
                self.features[:, index].copy_(residual)


def logits_of(weights: Weights, rows: Pass) -> Float[Tensor, "wanted vocab"]:
    """Return the logits of the requested rows, and store keys, values and features of all rows."""
    ends, eps = weights.ends, weights.decoder.norm_eps
    residual = F.embedding(rows.tokens, ends.embedding)
    for index, layer in enumerate(weights.layers):
        rows.keep_features(index, residual)
        normed = _norm(residual, layer.input_norm, eps)
        attended = rows.attend(index, layer, F.linear(normed, layer.qkv, layer.qkv_bias))
        residual = residual + F.linear(attended, layer.output)
        normed = _norm(residual, layer.post_norm, eps)
        residual = residual + F.linear(_gate(F.linear(normed, layer.gate_up)), layer.down)
    rows.keep_features(len(weights.layers), residual)
    wanted = residual.index_select(0, rows.wanted)
    return F.linear(_norm(wanted, ends.norm, eps), ends.head)
