"""Runs a checkpoint's head without caches, for comparison with the drafts of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.align.evaluation.attached import head_logits, read_text
from forerun.drafters.eagle3.formats import is_eagle3
from forerun.drafters.eagle3.head import Eagle3Head
from forerun.drafters.eagle3.load import examine
from forerun.drafters.medusa.checkpoint import read_medusa
from forerun.drafters.medusa.head import MedusaHeads
from forerun.models.base import LanguageModel
from forerun.models.checkpoint import read_object

__all__ = ["ReferenceHead", "reference_head"]


class ReferenceHead:
    """A head with its target, evaluated over whole texts without caches.

    Args:
        head: in fp32.
        target: whose hidden states it reads; no request may be running on it.
    """

    def __init__(self, head: Eagle3Head | MedusaHeads, target: LanguageModel) -> None:
        self.head = head
        self.target = target

    def logits(self, ids: Sequence[int], first: int) -> Float[Tensor, "read vocab"]:
        """Return logits of the first drafted token after each row from `first` to the last but one.

        Args:
            ids: a text.
            first: row; row 0 has no draft behind it, so none is returned from there.
        """
        ids = ids[: self.target.max_context]
        if first < 1 or len(ids) < first + 2:
            return torch.empty(0, self.target.vocab_size)
        if isinstance(self.head, Eagle3Head):
            _, features = read_text(self.target, ids, self.head.config.feature_layers)
            drafted = head_logits(self.target, self.head, ids, features)
        else:
            _, features = read_text(self.target, ids, (self.target.num_layers,))
            hidden = self.target.final_norm(features[:, 0]).float()
            drafted = self.head(hidden, self.target.head, 1)[0]
        return drafted[first - 1 : -1].float()


def reference_head(folder: Path, target: LanguageModel) -> ReferenceHead:
    """Load the head in a folder in fp32 for evaluation without caches.

    Raises:
        InvalidModel: it is damaged.
        IncompatibleDraft: it was trained for another target.
    """
    if is_eagle3(read_object(folder / "config.json")):
        head = examine(folder, target).head
        return ReferenceHead(head.to(target.device).requires_grad_(False), target)
    heads = read_medusa(folder, vocab_size=target.vocab_size)
    return ReferenceHead(heads.to(target.device).requires_grad_(False), target)
