"""Deepen a draft: layers that say nothing at first, so that what was learned is kept.

A new layer is a copy of the one before it whose two outputs into the residual stream are zero: the
grown draft's logits are those of the old one, and training wakes the layer up. On the CPU a layer
of the shipped draft adds about a tenth to its pass, most of which reads the head.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LAYER = re.compile(r"^(model\.layers\.)(\d+)(\..*)$")
OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def grow(draft: Path, out: Path, num_layers: int) -> Path:
    """Write a draft of `num_layers` that says what `draft` says; returns its folder.

    Raises:
        ValueError: the number is no multiple of the draft's own.
    """
    config = json.loads((draft / "config.json").read_text("utf-8"))
    copies, left = divmod(num_layers, config["num_hidden_layers"])
    if left or not copies:
        raise ValueError(f"{num_layers} layers are no multiple of {config['num_hidden_layers']}")
    weights = load_file(draft / "model.safetensors")
    grown = {name: tensor for name, tensor in weights.items() if LAYER.match(name) is None}
    for name, tensor in weights.items():
        if found := LAYER.match(name):
            start, number, rest = found.groups()
            for copy in range(copies):
                grown[f"{start}{int(number) * copies + copy}{rest}"] = layer(tensor, rest, copy)
    shutil.copytree(draft, out, ignore=shutil.ignore_patterns("forerun.json", "*.md"))
    save_file(grown, out / "model.safetensors", metadata={"format": "pt"})
    config["num_hidden_layers"] = num_layers
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    return out


def layer(tensor: Tensor, name: str, copy: int) -> Tensor:
    """A weight of the old layer (copy 0) or of a silent one behind it."""
    silent = copy > 0 and name.endswith(OUTPUTS)
    return torch.zeros_like(tensor) if silent else tensor.clone()
