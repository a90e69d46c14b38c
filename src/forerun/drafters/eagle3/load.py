"""Loading of an EAGLE-3 head for a target; a head that does not fit it raises an error."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from forerun.drafters.eagle3.checkpoint import read_parts
from forerun.drafters.eagle3.config import Eagle3Config
from forerun.drafters.eagle3.drafter import AttachedModel, Eagle3Drafter
from forerun.drafters.eagle3.gate import GateReport, check_head
from forerun.drafters.eagle3.golden import read_golden
from forerun.drafters.eagle3.head import Eagle3Head
from forerun.drafters.eagle3.native import NativeEagle3Model
from forerun.errors import IncompatibleDraft, RunnerUnavailable
from forerun.models.base import LanguageModel
from forerun.models.kv_store import StoredModel
from forerun.models.runner.native import NativeModel

__all__ = ["check_target", "examine", "load_eagle3", "model_of"]

logger = logging.getLogger("forerun.loading")


def load_eagle3(folder: Path, target: LanguageModel) -> Eagle3Drafter:
    """Load the EAGLE-3 head in a folder for a loaded target.

    Raises:
        InvalidModel: the folder is damaged or of an unsupported kind.
        IncompatibleDraft: the head was made for another target.
        UnsupportedFeatures: the target has no embedding that the head could use.
        NotEnoughMemory: there is no room for its keys and values.
    """
    report = examine(folder, target)
    if not report.head.config.own_embedding:  # a target without one is refused before any request
        target.embed(torch.zeros(1, dtype=torch.int64, device=target.device))
    for change in report.changes:
        logger.warning(
            "the EAGLE-3 head in %s is read with %s: its golden rows show it", folder, change
        )
    if not report.is_checked:
        logger.info("the EAGLE-3 head in %s has no golden rows: its flags are not checked", folder)
    dtype = target.dtype if isinstance(target, StoredModel) else torch.float32
    head = report.head.to(device=target.device, dtype=dtype).requires_grad_(False)
    return Eagle3Drafter(model_of(head, target), head.config.feature_layers, target.vocab_size)


def examine(
    folder: Path, target: LanguageModel | None, num_target_layers: int | None = None
) -> GateReport:
    """Read a head and check it by its golden rows.

    Args:
        folder: of the head.
        target: its target; None: sizes and layers are not compared.
        num_target_layers: of the target where it is not loaded, for files that name no layers.

    Raises:
        InvalidModel: the folder is damaged, of an unsupported kind, or not as its golden rows say.
        IncompatibleDraft: the head was made for another target.
    """
    if target is not None:
        num_target_layers = target.num_layers
    config, tensors = read_parts(folder, num_target_layers=num_target_layers)
    if target is not None:
        check_target(config, target, str(folder))
    report = check_head(config, tensors, str(folder), golden=read_golden(folder), target=target)
    if target is not None:  # only now: golden rows may show that the layers are mislabelled
        check_layers(report.head.config, target, str(folder))
    return report


def model_of(head: Eagle3Head, target: LanguageModel) -> AttachedModel:
    """Return the head as a model, which runs in the CPU kernels if the target does."""
    if isinstance(target, NativeModel):
        try:
            return NativeEagle3Model(head, target)
        except RunnerUnavailable as error:
            logger.info("the EAGLE-3 head runs in torch: %s", error)
    from forerun.drafters.eagle3.model import Eagle3Model  # imports transformers

    return Eagle3Model(head, target)


def check_target(config: Eagle3Config, target: LanguageModel, where: str) -> None:
    """Refuse a head whose sizes differ from those of the target.

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


def check_layers(config: Eagle3Config, target: LanguageModel, where: str) -> None:
    """Refuse a head that reads layers beyond those of the target.

    Raises:
        IncompatibleDraft: naming the first one.
    """
    outside = [i for i in config.feature_layers if not 0 <= i <= target.num_layers]
    if outside:
        raise IncompatibleDraft(
            f"the EAGLE-3 head in {where} reads layer {outside[0]} of its target, this target has "
            f"{target.num_layers} layers: use a head that was trained for this target"
        )
