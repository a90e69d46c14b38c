"""One pass through a decoder: packed rows of tokens in, logits of the wanted rows out.

What depends on the layout of the rows or on the hardware is handed in: who attends to what, and how
the element-wise work between two matrices is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.models.decoder import LayerWeights
from forerun.models.runner.graphs.weights import Weights

__all__ = ["Attend", "Elementwise", "Pass", "logits_of"]


@runtime_checkable
class Attend(Protocol):
    """Attention of the rows of one pass."""

    def __call__(
        self, index: int, layer: LayerWeights, qkv: Float[Tensor, "rows qkv_rows"]
    ) -> Float[Tensor, "rows query_rows"]:
        """Rotate, store the keys and values of layer `index`, attend."""


@runtime_checkable
class Elementwise(Protocol):
    """Operations between two matrix products."""

    def add_norm(
        self,
        residual: Float[Tensor, "rows hidden"],
        update: Float[Tensor, "rows hidden"],
        weight: Float[Tensor, " hidden"],
        eps: float,
    ) -> tuple[Float[Tensor, "rows hidden"], Float[Tensor, "rows hidden"]]:
        """The sum, and its RMS norm times `weight`."""

    def norm(
        self, rows: Float[Tensor, "rows hidden"], weight: Float[Tensor, " hidden"], eps: float
    ) -> Float[Tensor, "rows hidden"]:
        """RMS norm times `weight`."""

    def gate(
        self, gate_up: Float[Tensor, "rows gate_up_rows"]
    ) -> Float[Tensor, "rows intermediate"]:
        """SiLU of the first half times the second."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """Inputs and kernels of one pass.

    Attributes:
        tokens: id per row.
        wanted: rows whose logits are wanted.
        attend: attention over these rows.
        elementwise: the work between matrices.
        feature_layers: layers whose input goes to `features`.
        features: where it goes; None when no layer is wanted.
    """

    tokens: Int64[Tensor, " rows"]
    wanted: Int64[Tensor, " wanted"]
    attend: Attend
    elementwise: Elementwise
    feature_layers: tuple[int, ...] = ()
    features: Float[Tensor, "rows layers hidden"] | None = None

    def keep_features(self, layer: int, residual: Float[Tensor, "rows hidden"]) -> None:
        """Copy the residual stream entering `layer` to where it was asked for."""
        if self.features is None:
            return
        for index, wanted in enumerate(self.feature_layers):
            if wanted == layer:
                self.features[:, index].copy_(residual)


def logits_of(weights: Weights, rows: Pass) -> Float[Tensor, "wanted vocab"]:
    """Logits of the wanted rows; stores keys, values and wanted features of every row."""
    ends, eps, work = weights.ends, weights.decoder.norm_eps, rows.elementwise
    residual = F.embedding(rows.tokens, ends.embedding)
    normed = work.norm(residual, weights.layers[0].input_norm, eps)
    last = len(weights.layers) - 1
    for index, layer in enumerate(weights.layers):
        rows.keep_features(index, residual)
        attended = rows.attend(index, layer, F.linear(normed, layer.qkv, layer.qkv_bias))
        update = F.linear(attended, layer.output)
        residual, normed = work.add_norm(residual, update, layer.post_norm, eps)
        update = F.linear(work.gate(F.linear(normed, layer.gate_up)), layer.down)
        if index < last:
            next_norm = weights.layers[index + 1].input_norm
            residual, normed = work.add_norm(residual, update, next_norm, eps)
    if last + 1 in rows.feature_layers:
        rows.keep_features(last + 1, residual + update)
    wanted = (residual.index_select(0, rows.wanted), update.index_select(0, rows.wanted))
    return F.linear(work.add_norm(*wanted, ends.norm, eps)[1], ends.head)
