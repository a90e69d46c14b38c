"""Loading of an EAGLE-3 head for a target: contradictions are errors before anything drafts."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from forerun.drafters.eagle3.checkpoint import read_eagle3_head
from forerun.drafters.eagle3.config import Eagle3Config
from forerun.drafters.eagle3.drafter import AttachedModel, Eagle3Drafter
from forerun.drafters.eagle3.head import Eagle3Head
from forerun.drafters.eagle3.native import NativeEagle3Model
from forerun.errors import IncompatibleDraft, RunnerUnavailable
from forerun.models.base import LanguageModel
from forerun.models.kv_store import StoredModel
from forerun.models.runner.native import NativeModel

__all__ = ["check_target", "load_eagle3", "model_of"]

logger = logging.getLogger("forerun.loading")


def load_eagle3(folder: Path, target: LanguageModel) -> Eagle3Drafter:
    """Load the EAGLE-3 head in a folder for a loaded target.

    Raises:
        InvalidModel: the folder is damaged or of an unsupported kind.
        IncompatibleDraft: the head was made for another target.
        NotEnoughMemory: there is no room for its keys and values.
    """
    head = read_eagle3_head(folder, num_target_layers=target.num_layers)
    check_target(head.config, target, str(folder))
    dtype = target.dtype if isinstance(target, StoredModel) else torch.float32
    head = head.to(device=target.device, dtype=dtype).requires_grad_(False)
    return Eagle3Drafter(model_of(head, target), head.config.feature_layers, target.vocab_size)


def model_of(head: Eagle3Head, target: LanguageModel) -> AttachedModel:
    """Return the head as a model, in the kernels where the target is."""
    if isinstance(target, NativeModel):
        try:
            return NativeEagle3Model(head, target)
        except RunnerUnavailable as error:
            logger.info("the EAGLE-3 head runs in torch: %s", error)
    from forerun.drafters.eagle3.model import Eagle3Model  # imports transformers

    return Eagle3Model(head, target)


def check_target(config: Eagle3Config, target: LanguageModel, where: str) -> None:
    """Refuse a head whose sizes are not those of the target.

    Raises:
        IncompatibleDraft: naming the first size that differs.
    """
    sizes = {
        "hidden size": (config.target_hidden_size, target.hidden_size),
        "vocabulary": (config.target_vocab_size, target.vocab_size),
    }
    for name, (wanted, given) in sizes.items():
        if wanted != given:
            raise IncompatibleDraft(
                f"the EAGLE-3 head in {where} was made for a target with {name} {wanted}, this "
                f"target has {given}: use a head that was trained for this target"
            )
    outside = [i for i in config.feature_layers if not 0 <= i <= target.num_layers]
    if outside:
        raise IncompatibleDraft(
            f"the EAGLE-3 head in {where} reads layer {outside[0]} of its target, this target has "
            f"{target.num_layers} layers: use a head that was trained for this target"
        )
