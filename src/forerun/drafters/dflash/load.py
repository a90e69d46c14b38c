"""Reads, checks, writes and loads DFlash networks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import torch

from forerun.drafters.base import check_made_for
from forerun.drafters.dflash.drafter import DFlashDrafter
from forerun.drafters.dflash.native import NativeBlocks
from forerun.drafters.dflash.network import (
    DFlashNetwork,
    is_dflash,
    make_settings,
    read_dflash_config,
)
from forerun.drafters.heads import (
    check_head_tensors,
    check_layers_of,
    fill_head,
    is_stored_in_int8,
    read_head_tensors,
    read_target_ids,
    write_head_files,
)
from forerun.errors import InvalidModel, RunnerUnavailable
from forerun.models.architecture import WeightFormat
from forerun.models.base import LanguageModel
from forerun.models.checkpoint import read_object
from forerun.models.runner.native import NativeModel

logger = logging.getLogger("forerun.loading")

RENAMED = {"encoder.fc": "fc", "encoder.output_norm_enc": "hidden_norm"}
"""Names of tensors in transformers, and those used here."""


def read_dflash(folder: Path) -> DFlashNetwork:
    """Read a DFlash network in speculators' or z-lab's form, with weights in fp32."""
    settings = read_object(folder / "config.json")
    if not is_dflash(settings):
        raise InvalidModel(f"{folder / 'config.json'} does not describe a DFlash network")
    tensors = read_head_tensors(folder, RENAMED)
    config = read_dflash_config(settings, [*tensors])
    where = str(folder)
    check_head_tensors(config, lambda: DFlashNetwork(config), tensors, where)
    network = DFlashNetwork(config, read_target_ids(config, tensors, where))
    fill_head(network, tensors, where)
    return network.eval().float()


def write_dflash(
    network: DFlashNetwork,
    folder: Path,
    *,
    form: Literal["speculators", "int8"] = "speculators",
    target: str,
    target_architecture: str = "LlamaForCausalLM",
) -> None:
    """Write a network; "int8" is speculators' form with int8 matrices, which forerun reads."""
    settings = make_settings(network.config, target=target, target_architecture=target_architecture)
    tensors = network.state_dict()
    if not network.config.own_output:  # all tokens are drafted, so there are no maps
        tensors = {name: tensors[name] for name in tensors if name not in ("d2t", "t2d")}
    write_head_files(folder, settings, tensors, as_int8=form == "int8")


def read_dflash_for(folder: Path, target: LanguageModel) -> DFlashNetwork:
    """Read a network in fp32 and check that its sizes and layers are those of a target."""
    network = read_dflash(folder)
    config, what = network.config, f"the DFlash network in {folder}"
    sizes = (config.target_hidden_size, config.target_vocab_size)
    check_made_for(f"{what} was", sizes, target)
    check_layers_of(what, config, target.num_layers)
    return network


def load_dflash(folder: Path, target: LanguageModel) -> DFlashDrafter:
    """Load the DFlash network in a folder for a loaded target.

    In the kernels of a native target its matrices keep 8 bits where they are stored in 8 bits, and
    otherwise have the target's dtype.
    """
    network = read_dflash_for(folder, target)
    if not network.config.own_output:  # a target without a matrix is refused before any request
        row = torch.zeros((1, target.hidden_size), dtype=target.dtype, device=target.device)
        target.head(row)
    network = network.requires_grad_(False)
    if isinstance(target, NativeModel):
        try:
            weights: WeightFormat = "int8" if is_stored_in_int8(folder) else "auto"
            return DFlashDrafter(network, target, NativeBlocks(network, target, weights))
        except RunnerUnavailable as error:
            logger.info("the DFlash network runs in torch: %s", error)
    return DFlashDrafter(network.to(device=target.device, dtype=target.dtype), target)
