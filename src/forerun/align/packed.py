"""How packed rows are handed to a decoder of transformers, so that no sample sees another."""

from __future__ import annotations

from typing import Any

from jaxtyping import Bool
from torch import Tensor

from forerun.align.batch import Batch

__all__ = ["packed_inputs"]

BLIND_TO_POSITIONS = frozenset({"opt"})
"""Model types whose decoders do not tell samples apart by positions that begin again."""


def packed_inputs(batch: Batch, model_type: str) -> dict[str, Any]:
    """Arguments of a decoder's forward for a batch.

    Most decoders recognise packed rows by their positions, and windows are then counted within
    samples; those that do not are given who sees whom.

    Args:
        batch: on the device of the decoder.
        model_type: of its configuration.
    """
    inputs = {"input_ids": batch.ids, "position_ids": batch.positions, "use_cache": False}
    if model_type in BLIND_TO_POSITIONS:
        inputs["attention_mask"] = seen(batch)
    return inputs


def seen(batch: Batch) -> Bool[Tensor, "rows 1 width width"]:
    """Whether a place sees another: an earlier one of its own text, or itself."""
    texts = (batch.positions == 0).cumsum(-1)
    alike = texts[:, :, None] == texts[:, None, :]
    return alike.tril()[:, None]
