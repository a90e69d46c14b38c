"""Measures passes of an EAGLE-3 head over the target's features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from forerun.drafters.eagle3.drafter import AttachedModel
from forerun.drafters.eagle3.states import HeadBatch
from forerun.models.base import KVPrefix, RowBatch
from forerun.probe.config import ProfileCell, Quantity
from forerun.probe.pass_rig import PassRig, prefixes, rows_of
from forerun.probe.stopwatch import Stopwatch

__all__ = ["HeadRig", "head_prefixes"]

FeatureShape = tuple[int, int]
"""Layers that a head reads, and the width of the target's residual stream."""


class HeadRig(PassRig):
    """Measures passes and chains of a head after a committed prefix.

    What a pass takes includes the projection of the target's features. Their values are arbitrary:
    no time depends on them.

    Args:
        model: the head.
        cells: what to measure, all of one context.
        prefix: that context, as `head_prefixes` made it.
        stopwatch: of the model's device.
        shape: of a row's features.
    """

    def __init__(
        self,
        model: AttachedModel,
        cells: Sequence[ProfileCell],
        prefix: KVPrefix,
        stopwatch: Stopwatch,
        shape: FeatureShape,
    ) -> None:
        super().__init__(model, cells, prefix, stopwatch)
        self.attached = model
        self._shape = shape

    def _work(self, cell: ProfileCell, slots: Sequence[int]) -> Callable[[], object]:
        num_rows = 1 if cell.quantity is Quantity.DRAFT_CHAIN else cell.size
        slots = slots[:1] if cell.quantity is Quantity.DRAFT_READ else slots
        batch = rows_of(self.attached, slots, self.prefix.num_tokens, num_rows)
        features = some_features(self.attached, len(batch.tokens), self._shape)
        model, vocab_size = self.attached, self.attached.vocab_size
        if cell.quantity is Quantity.DRAFT_CHAIN:
            return lambda: model.greedy_chain(
                HeadBatch.of(batch, model.fuse(features)), cell.size, vocab_size
            )
        return lambda: model.forward(HeadBatch.of(batch, model.fuse(features)))


def head_prefixes(
    model: AttachedModel, contexts: Sequence[int], shape: FeatureShape
) -> Mapping[int, KVPrefix]:
    """Return KV prefixes of one sequence for a head, by length.

    Args:
        model: the head.
        contexts: lengths.
        shape: of a row's features.
    """

    def forward(batch: RowBatch) -> object:
        features = some_features(model, len(batch.tokens), shape)
        return model.forward(HeadBatch.of(batch, model.fuse(features)))

    return prefixes(model, contexts, forward)


def some_features(model: AttachedModel, num_rows: int, shape: FeatureShape) -> Tensor:
    """Return arbitrary features [rows, layers, width]."""
    dtype = model.embed(torch.zeros(1, dtype=torch.int64, device=model.device)).dtype
    return torch.ones((num_rows, *shape), dtype=dtype, device=model.device)
