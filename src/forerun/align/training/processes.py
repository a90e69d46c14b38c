"""Sets up the training processes, and stops them between two steps after a signal."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any, Literal, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    broadcast_object_list,
)
from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["StopSignal", "configure_sharding", "from_main", "make_accelerator"]

MadeT = TypeVar("MadeT")

COLLECTIVE_TIMEOUT = timedelta(days=7)
"""Other processes wait while the main one generates and judges, however long that takes."""


def make_accelerator(
    device: str = "auto", mixed_precision: Literal["no", "bf16"] = "bf16"
) -> Accelerator:
    """Return the accelerator over all launched processes, or over this process alone.

    Args:
        device: "cpu" keeps to the CPU; anything else takes a GPU where there is one.
        mixed_precision: of the passes; weights are fp32 in any case.
    """
    # Processes without GPUs connect only if Accelerate is given cpu=True.
    on_cpu = device == "cpu" or not torch.accelerator.is_available()
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        cpu=on_cpu,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT)],
    )
    if accelerator.is_fsdp2:
        configure_sharding(accelerator.state.fsdp_plugin, mixed_precision)
    return accelerator


def configure_sharding(plugin: FullyShardedDataParallelPlugin, mixed_precision: str) -> None:
    """Set the FSDP2 options that this training requires, overriding `accelerate config`.

    Every process reads the draft: the other way leaves all but one with empty models, and each of
    them checks the draft and reads the target. Gradients are added up in fp32, and the loss stays
    in it: by itself Accelerate rounds both to bf16.
    """
    plugin.cpu_ram_efficient_loading = False
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # transformers reads this
    if mixed_precision == "bf16":
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )


def from_main(accelerator: Accelerator, make: Callable[[], MadeT]) -> MadeT:
    """Compute a value in the main process and send it to all processes."""
    made = [make() if accelerator.is_main_process else None]
    if accelerator.num_processes > 1:
        broadcast_object_list(made)
    assert made[0] is not None
    return made[0]


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Records the first SIGINT or SIGTERM; the second one has its usual effect.

    Only the main thread may handle signals: elsewhere nothing is noted.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = {name: signal.signal(name, self._note) for name in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        while self._before:
            name, handler = self._before.popitem()
            signal.signal(name, handler)
