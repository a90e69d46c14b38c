"""Which processes train together, and on what."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, InitProcessGroupKwargs
from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["make_accelerator", "settle_shards"]

PATIENCE = timedelta(days=7)
"""Other processes wait while the main one generates and judges, however long that takes."""


def make_accelerator(
    device: str = "auto", mixed_precision: Literal["no", "bf16"] = "bf16"
) -> Accelerator:
    """The processes `accelerate launch` or torchrun started, or this one alone.

    Args:
        device: "cpu" keeps to the CPU; anything else takes a GPU where there is one.
        mixed_precision: of the passes; weights are fp32 in any case.
    """
    # Processes without GPUs do not find each other unless Accelerate is told that they have none.
    on_cpu = device == "cpu" or not torch.accelerator.is_available()
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        cpu=on_cpu,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )
    if accelerator.is_fsdp2:
        settle_shards(accelerator.state.fsdp_plugin, mixed_precision)
    return accelerator


def settle_shards(plugin: FullyShardedDataParallelPlugin, mixed_precision: str) -> None:
    """What this training needs of FSDP2, whatever `accelerate config` says of it.

    Every process reads the draft: the other way leaves all but one with empty models, and each of
    them checks the draft and reads the target. Gradients are added up in fp32, and the loss stays
    in it: by itself Accelerate rounds both to bf16.
    """
    plugin.cpu_ram_efficient_loading = False
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # transformers looks here
    if mixed_precision == "bf16":
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
