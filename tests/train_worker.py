"""One process of a training in miniature: what the tests of several processes and of kills start.

    python -m tests.train_worker FOLDER STEPS [--sharded] [--head] [--hang-at STEP]
        [+ FOLDER STEPS ...]

What follows a + is another training of the same processes. FOLDER holds target and draft; metrics,
checkpoint and the trained draft are written beside them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from tests import training

from forerun.align.methods.base import Method
from forerun.align.trainer import configure_sharding
from forerun.align.workspace import StepMetrics, append_line, read_lines, write_lines

METRICS = "metrics.jsonl"


def accelerator_of(sharded: bool, precision: Literal["no", "bf16"]) -> Accelerator:
    """Processes over gloo, as `accelerate launch --cpu` starts them."""
    accelerator = training.fresh_accelerator(precision)
    if sharded:
        # Accelerate shards on GPUs only, and leaves `--use_fsdp` aside on CPUs. What it does there
        # works here as well once it is told to, which is how the tests get at it without a GPU.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            reshard_after_forward=True,
        )
        configure_sharding(accelerator.state.fsdp_plugin, precision)
    return accelerator


def train(
    folder: Path,
    num_steps: int,
    *,
    sharded: bool = False,
    precision: Literal["no", "bf16"] = "no",
    head: bool = False,
    on_step: Callable[[StepMetrics], None] = lambda metrics: None,
) -> None:
    """Train up to a step, from wherever a checkpoint says; `on_step` is told after the log."""
    accelerator = accelerator_of(sharded, precision)
    settings = training.config(checkpoint_every_s=0.0, rows_per_pass=2)
    draft: Method
    if head:
        draft, trainer = training.tiny_head(folder, settings, accelerator)
    else:
        draft = training.tiny_draft(folder)
        trainer = training.trainer_of(draft, folder, settings, accelerator=accelerator)
    log, is_main = folder / METRICS, accelerator.is_main_process
    done = trainer.resume()

    def told(metrics: StepMetrics) -> None:
        if is_main:
            append_line(log, metrics)
        on_step(metrics)

    if is_main:
        write_lines(log, [row for row in read_lines(log, StepMetrics) if row.step <= done])
    trainer.run(training.packing(), num_steps, told)
    weights = trainer.weights()
    if is_main:
        draft.save(folder / "trained", weights)


def run_one(arguments: list[str]) -> None:
    """The training of one group of arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--precision", default="no")
    parser.add_argument("--head", action="store_true")
    parser.add_argument("--hang-at", type=int)
    options = parser.parse_args(arguments)

    def hang(metrics: StepMetrics) -> None:
        if metrics.step == options.hang_at:
            time.sleep(600)  # to be killed: the step is logged, and not yet in a checkpoint

    train(
        options.folder,
        options.steps,
        sharded=options.sharded,
        precision=options.precision,
        head=options.head,
        on_step=hang,
    )


def main() -> None:
    torch.set_num_threads(1)
    groups: list[list[str]] = [[]]
    for argument in sys.argv[1:]:
        if argument == "+":
            groups.append([])
        else:
            groups[-1].append(argument)
    for arguments in groups:
        run_one(arguments)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    # Threads of gloo may outlive their group, and abort an interpreter that ends under them
    # (pytorch/pytorch#190489). All that was to be written is.
    os._exit(0)


if __name__ == "__main__":
    main()
