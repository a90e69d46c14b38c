"""A target whose weights are spread over the devices of one process, or of several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from forerun.align.teachers.share import Share
from forerun.align.teachers.target import TargetModel, adopt_target
from forerun.errors import NotEnoughMemory
from forerun.models.checkpoint import read_checkpoint
from forerun.models.huggingface import read_weights
from forerun.models.load import choose_device, choose_dtype, model_folder, read_config

__all__ = ["load_sharded"]


def load_sharded(source: str | Path, *, dtype: str, device: str, share: Share) -> TargetModel:
    """Load a target that is too large for one device.

    One process spreads the layers over all GPUs it has, one after the other (accelerate's device
    map). Several processes split every layer among them (FSDP2) and gather it when it is run, so
    all of them must make equally many passes, which `Filler` and the trainer do.

    Args:
        source: as for `load_target`.
        dtype: likewise.
        device: of this process, where there are several.
        share: of this process.

    Raises:
        InvalidModel: files are missing, damaged or of an unsupported kind.
        NotEnoughMemory: the GPUs together do not hold the weights.
    """
    checkpoint = read_checkpoint(model_folder(source))
    read_config(checkpoint)  # refuses what is not supported before a weight is read
    chosen_dtype = choose_dtype(dtype, checkpoint)
    if share.number == 1:
        model = read_weights(checkpoint, chosen_dtype, device_map="auto")
        refuse_offloaded(str(source), model)
        return adopt_target(model)
    target = None
    for turn in range(share.number):  # the host holds one whole copy at a time
        if turn == share.index:
            model = read_weights(checkpoint, chosen_dtype)
            target = split(model, choose_device(device), share.number)
        share.wait()
    assert target is not None
    return target


def split(model: Any, device: torch.device, number: int) -> TargetModel:
    """Every decoder layer, and what is outside of them, split over all processes.

    The head stays whole everywhere: laws are made of its rows in chunks of any size.
    """
    target = adopt_target(model)
    weight = target.head.weight.to(device, copy=True)  # it may be the embedding, which is split
    mesh = init_device_mesh(device.type, (number,))
    layer_classes = set(model._no_split_modules or ())
    for module in target.body.modules():
        if type(module).__name__ in layer_classes:
            fully_shard(module, mesh=mesh)
    fully_shard(target.body, mesh=mesh)
    head = replace(target.head.to(device), weight=weight)
    return TargetModel(
        body=target.body,
        head=head,
        model_type=target.model_type,
        max_positions=target.max_positions,
        device=device,
    )


def refuse_offloaded(source: str, model: nn.Module) -> None:
    """Layers read from CPU memory or disk in every pass would take days without saying so."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise NotEnoughMemory(
            f"the GPUs here together do not hold {source}; take its log-probabilities from a "
            "server (teacher top-k)"
        )
