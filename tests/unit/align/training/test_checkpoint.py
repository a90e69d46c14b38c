"""Checkpoints of a training: what a killed process left does not stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forerun.align.trainer import load_checkpoint, save_checkpoint
from forerun.errors import InvalidCheckpoint


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


def test_a_changed_bit_of_a_checkpoint_is_noticed(tmp_path):
    path, module = tmp_path / "checkpoint", nn.Linear(4, 4)
    optimiser = torch.optim.SGD(module.parameters())
    save_checkpoint(path, module, optimiser, step=3, identity={"a": "b"}, is_writer=True)
    assert load_checkpoint(path, module, optimiser, identity={"a": "b"}) == 3
    content = bytearray(path.read_bytes())
    content[-5] ^= 0x40
    path.write_bytes(content)
    with pytest.raises(InvalidCheckpoint, match="damaged: the hash does not match"):
        load_checkpoint(path, module, optimiser, identity={"a": "b"})
