"""Passes over a padded rectangle of rows, which can be recorded, and over ragged rows.

Prefill and other passes that fit no rectangle attend sequence by sequence and are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.models.attention import AttentionPass, attend_blocks, plan_pass
from forerun.models.base import ModelOutput, RowBatch
from forerun.models.decoder import Decoder, LayerWeights
from forerun.models.kv_store import ContiguousKVStore
from forerun.models.runner.graphs.layers import (
    Attend,
    Elementwise,
    Pass,
    Rotation,
    Weights,
    features_buffer,
    heads_of,
    logits_of,
    rotation_at,
)
from forerun.models.runner.graphs.rectangle import Inputs, PassShape, Rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RaggedAttention:
    """An `Attend` over views of the store, cut to each sequence's own keys."""

    decoder: Decoder
    rotation: Rotation
    plan: AttentionPass

    def __call__(
        self, index: int, layer: LayerWeights, qkv: Float[Tensor, "rows qkv_rows"]
    ) -> Float[Tensor, "rows query_rows"]:
        """Rotate queries and keys, store keys and values of layer `index`, compute attention."""
        heads = heads_of(self.decoder, layer, qkv, self.rotation)
        query, key, value = (part.transpose(0, 1)[None] for part in heads)
        scaling = self.decoder.architecture.head_dim**-0.5
        self.plan.write(index, key, value)
        attended = attend_blocks(index, query, self.plan.blocks(None), scaling)
        return attended.reshape(len(qkv), -1)


def ragged_pass(weights: Weights, store: ContiguousKVStore, batch: RowBatch) -> ModelOutput:
    """Stage the rows of a pass and run it without a recording."""
    features = features_buffer(weights, len(batch.tokens), batch.feature_layers)
    decoder = weights.decoder
    groups = decoder.architecture.num_heads // decoder.architecture.num_kv_heads
    rows = Pass(
        tokens=batch.tokens,
        wanted=batch.logit_rows,
        attend=RaggedAttention(
            decoder=decoder,
            rotation=rotation_at(decoder, batch.positions),
            plan=plan_pass(batch.spans, store, groups),
        ),
        elementwise=Elementwise(),
        feature_layers=batch.feature_layers,
        features=features,
    )
    return ModelOutput(logits=logits_of(weights, rows), features=features)


AttendRows = Callable[[Decoder, ContiguousKVStore, Rows], Attend]
"""Attention over a rectangle; called anew in every pass, inside the recording."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RectanglePass:
    """Passes that launch the same operations whatever values their input buffers hold."""

    weights: Weights
    store: ContiguousKVStore
    attend_rows: AttendRows
    elementwise: Elementwise

    def forward(self, inputs: Inputs) -> Float[Tensor, "wanted vocab"]:
        """Run the pass that the input buffers describe; its features go to the features buffer."""
        return self.logits(inputs.rows, inputs.tokens, inputs.wanted, inputs.features)

    def logits(
        self,
        rows: Rows,
        tokens: Int64[Tensor, " rows"],
        wanted: Int64[Tensor, " wanted"],
        features: Tensor | None = None,
    ) -> Float[Tensor, "wanted vocab"]:
        """Run one pass and return its logits."""
        attend = self.attend_rows(self.weights.decoder, self.store, rows)
        return logits_of(
            self.weights,
            Pass(
                tokens=tokens,
                wanted=wanted,
                attend=attend,
                elementwise=self.elementwise,
                feature_layers=rows.bucket.feature_layers,
                features=features,
            ),
        )

    def greedy_chain(
        self, inputs: Inputs, num_tokens: int, vocab_size: int
    ) -> Int64[Tensor, "sequences num_tokens"]:
        """Feed the rectangle, then extend every sequence by its most likely tokens."""
        bucket = inputs.bucket
        sequences = torch.arange(bucket.num_sequences, device=inputs.tokens.device)
        last = (sequences + 1) * bucket.num_rows - 1
        logits = self.logits(inputs.rows, inputs.tokens, last)
        tokens = most_likely(logits, vocab_size, inputs.original)
        chain = [tokens]
        for depth in range(num_tokens - 1):
            logits = self.logits(_next_rows(inputs.rows, depth), tokens, sequences)
            tokens = most_likely(logits, vocab_size, inputs.original)
            chain.append(tokens)
        return torch.stack(chain, dim=1)


def most_likely(
    logits: Float[Tensor, "sequences vocab"], vocab_size: int, original: Int64[Tensor, " sequences"]
) -> Int64[Tensor, " sequences"]:
    return logits[:, :vocab_size].argmax(dim=-1).index_select(0, original)


def _next_rows(rows: Rows, depth: int) -> Rows:
    """Return one row per sequence, `depth` positions after its first draft position."""
    bucket = PassShape(
        num_sequences=rows.bucket.num_sequences,
        num_rows=1,
        num_wanted=rows.bucket.num_sequences,
        num_keys=rows.bucket.num_keys,
    )
    start = rows.end + depth
    return Rows(
        bucket=bucket,
        positions=rows.positions[:, -1:] + (depth + 1),
        index=start[:, None],
        visible=torch.ones_like(start[:, None]),
        slot=rows.slot,
        start=start,
        end=start + 1,
    )
