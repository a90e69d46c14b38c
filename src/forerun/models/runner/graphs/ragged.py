"""Passes that are not recorded: prefill and other passes that fit no rectangle."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from forerun.models.attention import AttentionPass, attend_blocks, plan_pass
from forerun.models.base import ModelOutput, RowBatch
from forerun.models.decoder import Decoder, LayerWeights
from forerun.models.kv_store import ContiguousKVStore
from forerun.models.runner.graphs.elementwise import (
    Rotation,
    TorchElementwise,
    heads_of,
    rotation_at,
)
from forerun.models.runner.graphs.layers import Pass, logits_of
from forerun.models.runner.graphs.weights import Weights, features_buffer

__all__ = ["RaggedAttention", "ragged_attention", "ragged_pass"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RaggedAttention:
    """An `Attend` over views of the store, cut to each sequence's own keys.

    Attributes:
        decoder: sizes and constants.
        rotation: of every row.
        plan: who writes where and sees what.
    """

    decoder: Decoder
    rotation: Rotation
    plan: AttentionPass

    def __call__(
        self, index: int, layer: LayerWeights, qkv: Float[Tensor, "rows qkv_rows"]
    ) -> Float[Tensor, "rows query_rows"]:
        """Rotate, store the keys and values of layer `index`, attend."""
        heads = heads_of(self.decoder, layer, qkv, self.rotation)
        query, key, value = (part.transpose(0, 1)[None] for part in heads)
        scaling = self.decoder.architecture.head_dim**-0.5
        self.plan.write(index, key, value)
        attended = attend_blocks(index, query, self.plan.blocks(None), scaling)
        return attended.reshape(len(qkv), -1)


def ragged_attention(
    decoder: Decoder, store: ContiguousKVStore, batch: RowBatch
) -> RaggedAttention:
    """Stage the rows of a pass and plan its attention.

    Raises:
        NotEnoughMemory: rows do not fit into their slot.
        ValueError: rows overwrite committed ones or leave a gap.
    """
    groups = decoder.architecture.num_heads // decoder.architecture.num_kv_heads
    return RaggedAttention(
        decoder=decoder,
        rotation=rotation_at(decoder, batch.positions),
        plan=plan_pass(batch.spans, store, groups),
    )


def ragged_pass(weights: Weights, store: ContiguousKVStore, batch: RowBatch) -> ModelOutput:
    """Stage the rows of a pass and run it without a recording.

    Raises:
        NotEnoughMemory: rows do not fit into their slot.
        ValueError: rows overwrite committed ones or leave a gap.
    """
    features = features_buffer(weights, len(batch.tokens), batch.feature_layers)
    rows = Pass(
        tokens=batch.tokens,
        wanted=batch.logit_rows,
        attend=ragged_attention(weights.decoder, store, batch),
        elementwise=TorchElementwise(),
        feature_layers=batch.feature_layers,
        features=features,
    )
    return ModelOutput(logits=logits_of(weights, rows), features=features)
