"""Checkpoint of a training: weights, optimiser state and step in one file with a hash.

The file does not depend on the number of processes or on sharding, so a run may continue with
another number of processes. There is no random state: order and schedule are functions of the
step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from forerun.atomic_write import atomic_write, remove_unfinished
from forerun.errors import InvalidCheckpoint
from forerun.models.tensor_files import writing_tensors

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""What activation checkpointing and compilation put into the names of parameters."""


def _named_trained(module: nn.Module) -> dict[str, nn.Parameter]:
    found = {}
    for name, parameter in module.named_parameters():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        if parameter.requires_grad:
            found[name] = parameter
    return found


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with its shards gathered; all processes must call it for the same tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained_weights(module: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Return the trained weights on the CPU by name, with shards gathered."""
    gathered = {}
    for name, parameter in _named_trained(module).items():
        tensor = whole(parameter.detach())
        if keep:
            gathered[name] = tensor.cpu().clone()
    return gathered


def save_checkpoint(
    path: Path,
    module: nn.Module,
    optimiser: Optimizer,
    *,
    step: int,
    identity: Mapping[str, str],
    is_writer: bool,
) -> None:
    """Write the state after `step` steps; an earlier file is replaced atomically."""
    tensors = {}
    for name, tensor in _state_tensors(module, optimiser):
        gathered = whole(tensor.detach())
        if is_writer:
            tensors[name] = gathered.cpu().clone()
    if not is_writer:
        return
    remove_unfinished(path)  # only this process writes it, under the lock of the folder
    with atomic_write(path) as scratch, writing_tensors():
        metadata = {
            "step": str(step),
            "identity": json.dumps(dict(identity)),
            "sha256": _tensors_hash(sorted(tensors.items())),
        }
        save_file(tensors, scratch, metadata)


def _tensors_hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names, types, shapes and values of tensors, given in order of their names."""
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _check_hash(file: Any, metadata: Mapping[str, str]) -> None:
    """Refuse a checkpoint whose tensors do not match its hash (ValueError); old files have none."""
    names = sorted(file.keys())
    found = _tensors_hash((name, file.get_tensor(name)) for name in names)
    if metadata.get("sha256", found) != found:
        raise ValueError("its content is damaged: the hash does not match")


def _state_tensors(module: nn.Module, optimiser: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in _named_trained(module).items():
        yield f"weights/{name}", parameter
        for key, value in optimiser.state[parameter].items():
            yield f"optimiser/{name}/{key}", value


def load_checkpoint(
    path: Path,
    module: nn.Module,
    optimiser: Optimizer,
    *,
    identity: Mapping[str, str],
    defaults: Mapping[str, str],
) -> int:
    if not path.exists():
        return 0
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            check_identity(path, json.loads(metadata["identity"]), identity, defaults)
            _check_hash(file, metadata)
            for name, parameter in _named_trained(module).items():
                with torch.no_grad():
                    parameter.copy_(laid_out(file.get_tensor(f"weights/{name}"), parameter))
                prefix = f"optimiser/{name}/"
                names = file.keys()
                for key in [name for name in names if name.startswith(prefix)]:
                    value = file.get_tensor(key)
                    optimiser.state[parameter][key.removeprefix(prefix)] = (
                        laid_out(value, parameter) if value.ndim else value.to(parameter.device)
                    )
            return int(metadata["step"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise InvalidCheckpoint(
            f"{path} cannot be read ({error}); delete it to start again"
        ) from error


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """Move a tensor to a parameter's device and shard it like the parameter."""
    tensor = tensor.to(like.device)
    if isinstance(like, DTensor):
        return distribute_tensor(tensor, like.device_mesh, like.placements)
    return tensor


def check_identity(
    path: Path, found: Mapping[str, str], wanted: Mapping[str, str], defaults: Mapping[str, str]
) -> None:
    """Refuse the checkpoint of a run with other settings (InvalidCheckpoint)."""
    different = differences(found, wanted, defaults)
    if different:
        raise InvalidCheckpoint(
            f"{path} is of another run ({'; '.join(different)}); use its settings, another "
            "output folder, or delete it"
        )


def differences(
    found: Mapping[str, str], wanted: Mapping[str, str], defaults: Mapping[str, str]
) -> list[str]:
    """Return the parts of two identities that differ, with both values."""
    before = {**{name: defaults[name] for name in wanted.keys() & defaults.keys()}, **found}
    return [
        f"{name} was {before.get(name)}, is {wanted.get(name)}"
        for name in sorted(before.keys() | wanted.keys())
        if before.get(name) != wanted.get(name)
    ]
