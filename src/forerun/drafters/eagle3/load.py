"""Reads, writes and loads EAGLE-3 heads.

Tensors are named as speculators names them (`layers.0.*`); the raw form of EAGLE, SpecForge and
SGLang calls the layer `midlayer`. Everything is checked: a tensor too many or too few, a wrong
shape or a draft vocabulary outside the target's is an error, because other engines fail silently
there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from forerun.drafters.base import check_made_for
from forerun.drafters.eagle3.drafter import (
    AttachedModel,
    Eagle3Drafter,
    Eagle3Model,
    NativeEagle3Model,
)
from forerun.drafters.eagle3.head import (
    Eagle3Config,
    Eagle3Head,
    config_of,
    is_eagle3,
    names_layers,
    origin_of_layers,
    raw_settings,
    speculators_settings,
)
from forerun.drafters.heads import (
    EMBEDDING,
    check_head_tensors,
    check_layers_of,
    fill_head,
    read_head_tensors,
    read_target_ids,
    write_head_files,
)
from forerun.errors import InvalidModel, RunnerUnavailable
from forerun.models.base import LanguageModel
from forerun.models.checkpoint import read_object
from forerun.models.runner.native import NativeModel

HeadFormat = Literal["speculators", "raw", "int8"]
LAYER, RAW_LAYER = "layers.0.", "midlayer."


def read_eagle3_head(folder: Path, *, num_target_layers: int | None = None) -> Eagle3Head:
    """Read an EAGLE-3 head in speculators' form or in the raw form, with weights in fp32."""
    settings = read_object(folder / "config.json")
    if not is_eagle3(settings):
        raise InvalidModel(f"{folder / 'config.json'} does not describe an EAGLE-3 head")
    tensors = read_head_tensors(folder, {RAW_LAYER: LAYER})
    own_embedding = EMBEDDING in tensors
    config = config_of(settings, num_target_layers=num_target_layers, own_embedding=own_embedding)
    return build_head(config, tensors, str(folder)).float()


def build_head(config: Eagle3Config, tensors: Mapping[str, Tensor], where: str) -> Eagle3Head:
    check_head_tensors(config, lambda: Eagle3Head(config), tensors, where)
    head = Eagle3Head(config, read_target_ids(config, tensors, where))
    fill_head(head, tensors, where)
    return head.eval()


def write_eagle3_head(
    head: Eagle3Head,
    folder: Path,
    *,
    form: HeadFormat = "speculators",
    target: str,
    target_architecture: str = "LlamaForCausalLM",
    num_speculative_tokens: int = 5,
) -> None:
    """Write a head: first config.json, then model.safetensors.

    Args:
        form: "int8" is speculators' with matrices as int8 and one fp32 scale per row, which forerun
            alone reads; in the others all parameters keep their dtype.
    """
    settings: dict[str, Any]
    if form != "raw":
        settings = speculators_settings(
            head.config,
            target=target,
            target_architecture=target_architecture,
            num_speculative_tokens=num_speculative_tokens,
        )
    else:
        settings = raw_settings(head.config)
    tensors = {renamed(name, form): value for name, value in head.state_dict().items()}
    write_head_files(folder, settings, tensors, as_int8=form == "int8")


def renamed(name: str, form: HeadFormat) -> str:
    if form == "raw" and name.startswith(LAYER):
        return RAW_LAYER + name.removeprefix(LAYER)
    return name


logger = logging.getLogger("forerun.loading")


def load_eagle3(folder: Path, target: LanguageModel) -> Eagle3Drafter:
    head = read_for(folder, target)
    if not head.config.own_embedding:  # a target without one is refused before any request
        target.embed(torch.zeros(1, dtype=torch.int64, device=target.device))
    if not names_layers(settings := read_object(folder / "config.json")):
        origin = origin_of_layers(settings, head.config.feature_layers)
        logger.warning("the EAGLE-3 head in %s: %s", folder, origin)
    dtype = target.dtype
    head = head.to(device=target.device, dtype=dtype).requires_grad_(False)
    return Eagle3Drafter(model_of(head, target), head.config.feature_layers, target.vocab_size)


def read_for(folder: Path, target: LanguageModel) -> Eagle3Head:
    """Read a head in fp32 and check that its sizes and layers are those of a target."""
    where = str(folder)
    head = read_eagle3_head(folder, num_target_layers=target.num_layers)
    sizes = (head.config.target_hidden_size, head.config.target_vocab_size)
    check_made_for(f"the EAGLE-3 head in {where} was", sizes, target)
    check_layers_of(f"the EAGLE-3 head in {where}", head.config, target.num_layers)
    return head


def model_of(head: Eagle3Head, target: LanguageModel) -> AttachedModel:
    if isinstance(target, NativeModel):
        try:
            return NativeEagle3Model(head, target)
        except RunnerUnavailable as error:
            logger.info("the EAGLE-3 head runs in torch: %s", error)
    return Eagle3Model(head, target)
