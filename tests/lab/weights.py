"""Checkpoints that are not what they were: tensors lost on the way, a target trained further."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tests.lab.dice import Dice
from torch import Tensor

from forerun.models.checkpoint import ModelFiles

__all__ = ["altered_copy", "forgotten", "moved", "renumbered"]

WEIGHTS = "model.safetensors"


def altered_copy(
    name: str, folder: Path, change: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
) -> str:
    """A copy of a model with other weights; its folder, which is taken as it is if it is there.

    Args:
        name: of the model to begin with.
        folder: of the copy.
        change: from its weights to those of the copy.
    """
    if not (folder / WEIGHTS).exists():
        shutil.copytree(ModelFiles.find(name).folder, folder, dirs_exist_ok=True)
        save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)
    return str(folder)


def forgotten(share: float, seed: int) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """Matrices that a loader has left as they were initialised: a share of them, drawn."""

    def change(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        matrices = sorted(name for name, tensor in weights.items() if tensor.dim() > 1)
        lost = set(Dice(seed, "lost").sample(matrices, max(1, round(share * len(matrices)))))
        return {
            name: torch.empty_like(tensor, dtype=torch.float32)
            .normal_(std=0.02, generator=generator)
            .to(tensor.dtype)
            if name in lost
            else tensor
            for name, tensor in weights.items()
        }

    return change


def moved(distance: float, seed: int) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """Every matrix moved by a random one of low rank, as an adapter that was merged moves it.

    Args:
        distance: norm of what is added over the norm of the matrix.
        seed: of what is added.
    """

    def change(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            name: added(tensor, distance, generator) if tensor.dim() > 1 else tensor
            for name, tensor in weights.items()
        }

    return change


RANK = 8


def added(matrix: Tensor, distance: float, generator: torch.Generator) -> Tensor:
    """The matrix and a random one of low rank."""
    left = torch.empty(matrix.shape[0], RANK).normal_(generator=generator)
    right = torch.empty(RANK, matrix.shape[1]).normal_(generator=generator)
    step = left @ right
    whole = matrix.to(torch.float32)
    size = float(distance * torch.linalg.vector_norm(whole) / torch.linalg.vector_norm(step))
    return whole.add(step, alpha=size).to(matrix.dtype)


def renumbered(name: str, folder: Path, ids: Sequence[int]) -> Path:
    """A copy of a model whose tokenizer calls the string of id i by `ids[i]`."""
    shutil.copytree(ModelFiles.find(name).folder, folder, dirs_exist_ok=True)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: ids[index] for token, index in vocabulary.items()}
    for token in tokenizer["added_tokens"]:
        token["id"] = ids[token["id"]]
    path.write_text(json.dumps(tokenizer), "utf-8")
    return folder
