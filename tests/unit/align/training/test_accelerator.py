"""What Accelerate is told, and what it is not left to decide."""

from __future__ import annotations

import os

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from tests import training

from forerun.align.trainer import configure_sharding, make_accelerator


def test_one_process_on_the_cpu() -> None:
    training.forget_accelerators()
    accelerator = make_accelerator("cpu", "no")
    assert accelerator.num_processes == 1
    assert accelerator.is_main_process
    assert accelerator.device == torch.device("cpu")


def test_shards_are_read_by_all_and_added_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True)
    plugin.set_mixed_precision("bf16")
    configure_sharding(plugin, "bf16")
    assert not plugin.cpu_ram_efficient_loading
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert policy.output_dtype is None


def test_without_autocast_nothing_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    configure_sharding(plugin, "no")
    assert plugin.mixed_precision_policy is None
