"""The weights of a decoder as tensors on one device."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.models.decoder import (
    Decoder,
    EndWeights,
    LayerWeights,
    ReadTensor,
    read_ends,
    read_layer,
)

__all__ = ["Weights", "features_buffer", "read_weights"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """All weights of a model.

    Attributes:
        decoder: sizes and constants; its rotation lies on the device of the weights.
        layers: in order.
        ends: embedding, last norm and head.
    """

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
        """Size of the model, tied parameters counted once."""
        return sum(tensor.numel() for tensor in self.tensors)


def features_buffer(
    weights: Weights, num_rows: int, layers: tuple[int, ...]
) -> Float[Tensor, "rows layers hidden"] | None:
    """Allocate the features of a pass; None if no layer is wanted."""
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
