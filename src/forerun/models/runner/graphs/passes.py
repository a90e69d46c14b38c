"""The functions that are recorded: one pass over a rectangle of rows, and a greedy chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.models.decoder import Decoder
from forerun.models.kv_store import ContiguousKVStore
from forerun.models.runner.graphs.inputs import Inputs, Rows
from forerun.models.runner.graphs.layers import Attend, Elementwise, Pass, logits_of
from forerun.models.runner.graphs.rectangle import PassShape
from forerun.models.runner.graphs.weights import Weights

__all__ = ["AttendRows", "RectanglePass"]

AttendRows = Callable[[Decoder, ContiguousKVStore, Rows], Attend]
"""Attention over a rectangle; called anew in every pass, inside the recording."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RectanglePass:
    """Passes that launch the same operations whatever values their input buffers hold.

    Attributes:
        weights: of the model.
        store: its KV.
        attend_rows: attention over a rectangle.
        elementwise: the work between matrices.
    """

    weights: Weights
    store: ContiguousKVStore
    attend_rows: AttendRows
    elementwise: Elementwise

    def forward(self, inputs: Inputs) -> Float[Tensor, "wanted vocab"]:
        """Logits of the pass that the buffers describe; its features go to their buffer."""
        return self.logits(inputs.rows, inputs.tokens, inputs.wanted, inputs.features)

    def logits(
        self,
        rows: Rows,
        tokens: Int64[Tensor, " rows"],
        wanted: Int64[Tensor, " wanted"],
        features: Tensor | None = None,
    ) -> Float[Tensor, "wanted vocab"]:
        """One pass."""
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
            logits = self.logits(next_rows(inputs.rows, depth), tokens, sequences)
            tokens = most_likely(logits, vocab_size, inputs.original)
            chain.append(tokens)
        return torch.stack(chain, dim=1)


def most_likely(
    logits: Float[Tensor, "sequences vocab"], vocab_size: int, original: Int64[Tensor, " sequences"]
) -> Int64[Tensor, " sequences"]:
    """Return the most likely token of each sequence; padding repeats the sequence it copies."""
    return logits[:, :vocab_size].argmax(dim=-1).index_select(0, original)


def next_rows(rows: Rows, depth: int) -> Rows:
    """One row per sequence, `depth` after the first one past those of `rows`."""
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
