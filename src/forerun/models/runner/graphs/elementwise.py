"""Norms, rotary embedding and gating in torch operations; Triton's kernels compute the same."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.models.decoder import Decoder, LayerWeights

__all__ = ["Rotation", "TorchElementwise", "heads_of", "rotation_at"]

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine per row and pair, fp32 [rows, head_dim / 2]."""


class TorchElementwise:
    """Operations between two matrix products, one torch call each."""

    def add_norm(
        self,
        residual: Float[Tensor, "rows hidden"],
        update: Float[Tensor, "rows hidden"],
        weight: Float[Tensor, " hidden"],
        eps: float,
    ) -> tuple[Float[Tensor, "rows hidden"], Float[Tensor, "rows hidden"]]:
        """The sum, and its RMS norm times `weight`."""
        total = residual + update
        return total, self.norm(total, weight, eps)

    def norm(
        self, rows: Float[Tensor, "rows hidden"], weight: Float[Tensor, " hidden"], eps: float
    ) -> Float[Tensor, "rows hidden"]:
        """RMS norm times `weight`."""
        return F.rms_norm(rows, rows.shape[-1:], weight, eps)

    def gate(
        self, gate_up: Float[Tensor, "rows gate_up_rows"]
    ) -> Float[Tensor, "rows intermediate"]:
        """SiLU of the first half times the second."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def rotation_at(decoder: Decoder, positions: Int64[Tensor, " rows"]) -> Rotation:
    """Rotation of every row, the same for all layers."""
    angles = positions[:, None].float() * decoder.inv_freq
    return angles.cos() * decoder.rope_scale, angles.sin() * decoder.rope_scale


def heads_of(
    decoder: Decoder,
    layer: LayerWeights,
    qkv: Float[Tensor, "rows qkv_rows"],
    rotation: Rotation,
) -> tuple[
    Float[Tensor, "rows heads head_dim"],
    Float[Tensor, "rows kv_heads head_dim"],
    Float[Tensor, "rows kv_heads head_dim"],
]:
    """Queries and keys, normed where the family does and rotated, and values."""
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
