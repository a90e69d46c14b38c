"""Which processes train together, and on what."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

__all__ = ["make_accelerator"]

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
        # Every process reads the draft: the other way leaves transformers with empty models in all
        # processes but one, and the draft is checked, and the target read, in each.
        accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    return accelerator
