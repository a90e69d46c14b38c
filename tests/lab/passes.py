"""Models that compute something else than they should, or the right thing in a bad way."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.models.base import (
    LanguageModel,
    ModelOutput,
    RowBatch,
    Span,
    WrappedModel,
    chain_by_forward,
)

__all__ = ["ForeignIds", "NearSighted", "RowByRow"]


class RowByRow(WrappedModel):
    """Takes the rows of a pass one after another: as many passes as rows.

    Trees are taken as chains, which is what draft models propose.
    """

    def forward(self, batch: RowBatch) -> ModelOutput:
        """One pass per row of the longest span, prompts in one piece."""
        if any(span.num_chain > 1 for span in batch.spans):
            return self.model.forward(batch)
        found: list[Float[Tensor, "rows vocab"]] = []
        row = 0
        for span in batch.spans:
            found += [self._one(batch, span, row, offset) for offset in range(span.num_rows)]
            row += span.num_rows
        return ModelOutput(logits=torch.cat(found)[batch.logit_rows])

    def _one(self, batch: RowBatch, span: Span, row: int, offset: int) -> Tensor:
        alone = slice(row + offset, row + offset + 1)
        return self.model.forward(
            RowBatch(
                tokens=batch.tokens[alone],
                positions=batch.positions[alone],
                spans=(Span(slot=span.slot, start=span.start + offset, num_chain=1),),
                logit_rows=torch.zeros(1, dtype=torch.int64),
            )
        ).logits


class LevelByLevel(WrappedModel):
    """A draft model whose chains go through `forward`, where a subclass changes what comes out."""

    def greedy_chain(
        self, batch: RowBatch, num_tokens: int, vocab_size: int
    ) -> Int64[Tensor, "sequences num_tokens"]:
        """Level by level."""
        return chain_by_forward(self, batch, num_tokens, vocab_size)


class ForeignIds(LevelByLevel):
    """A draft whose ids mean other strings: id i of the text is what it calls `ids[i]`.

    Args:
        model: the draft, with the ids it was trained with.
        ids: a permutation of the vocabulary.
        reads: whether it is fed foreign ids as well, or only answers in them.
    """

    def __init__(self, model: LanguageModel, ids: Int64[Tensor, " vocab"], *, reads: bool) -> None:
        super().__init__(model)
        self.ids = ids
        self.reads = reads

    def forward(self, batch: RowBatch) -> ModelOutput:
        """One pass; what it says of `ids[i]` is taken as said of i."""
        if self.reads:
            batch = replace(batch, tokens=self.ids[batch.tokens])
        return ModelOutput(logits=self.model.forward(batch).logits[:, self.ids])


class NearSighted(LevelByLevel):
    """A draft that was made for so many positions and is lost beyond them.

    All that lies further on is read at the last of them, as from a table that ends there.

    Args:
        model: the draft.
        window: positions it was made for.
    """

    def __init__(self, model: LanguageModel, window: int) -> None:
        super().__init__(model)
        self.window = window

    def forward(self, batch: RowBatch) -> ModelOutput:
        """One pass."""
        return self.model.forward(
            replace(batch, positions=batch.positions.clamp(max=self.window - 1))
        )
