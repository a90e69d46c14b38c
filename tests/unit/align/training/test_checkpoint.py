"""Checkpoints of a training: what a killed process left does not stay."""

from __future__ import annotations

import torch
from torch import nn

from forerun.align.trainer import save_checkpoint


def test_the_next_checkpoint_removes_what_a_killed_process_left(tmp_path):
    left = tmp_path / f"checkpoint.{'0' * 16}.tmp"
    left.write_bytes(b"half a checkpoint")
    module = nn.Linear(2, 2)
    save_checkpoint(
        tmp_path / "checkpoint",
        module,
        torch.optim.SGD(module.parameters()),
        step=1,
        identity={},
        is_writer=True,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
