"""Model folders with matrices of 8 and 4 bits: as `forerun quantise` writes them, and read again.

A matrix NAME in 8 bits is int8 (outputs, inputs); in 4 bits it is uint8 (outputs, inputs / 2), the
first half of a group of 32 in the low nibbles, with 8 added. NAME_scales has an fp16 scale per
output and group of 32 inputs. Everything else is stored as in the model that was quantised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.errors import InvalidModel
from forerun.models.decoder import QuantisedMatrix

METHOD = "forerun"
"""Value of quant_method in the quantization_config of config.json."""
GROUP = 32
SCALES = "_scales"
EMBEDDING = "model.embed_tokens.weight"
QUANTISED_HEAD = "lm_head.weight"
NUM_TRIED = 9
"""Scales tried for a group of 4 bits: the largest weight's, and smaller ones, which clip it."""


class QuantisedFolder:
    """The tensors of a quantised folder; their headers have been checked."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self.files = files

    @cached_property
    def _stored(self) -> Mapping[str, tuple[Path, tuple[int, ...], str]]:
        found = {}
        for path in self.files:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 (the file cannot be iterated over)
                        part = file.get_slice(name)
                        found[name] = path, tuple(part.get_shape()), part.get_dtype()
            except SafetensorError as error:
                raise InvalidModel(f"{path} cannot be read: {error}") from error
        return found

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the parameters; raises InvalidModel for scales that do not fit."""
        found = {}
        for name, (path, shape, dtype) in self._stored.items():
            if name.endswith(SCALES):
                continue
            bits = self.bits(name)
            if bits is not None:
                shape = (shape[0], shape[-1] * 8 // bits)
                scales = self._stored.get(f"{name}{SCALES}")
                fits = (path, (shape[0], shape[1] // GROUP), "F16")
                if scales is None or scales[1:] != fits[1:] or shape[1] % GROUP:
                    raise InvalidModel(f"{path} has no scales that fit {name:.80}: fetch it again")
            elif dtype not in ("BF16", "F16", "F32"):
                raise InvalidModel(f"{path} stores {name:.80} as {dtype}, which is not supported")
            found[name] = shape
        return found

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def bits(self, name: str) -> int | None:
        """Return the bits of a matrix; None for what is stored in floating point."""
        if name not in self._stored:
            return None
        _, shape, dtype = self._stored[name]
        return {"I8": 8, "U8": 4}.get(dtype) if len(shape) == 2 else None

    def quantised(self, name: str) -> QuantisedMatrix:
        """Return a matrix that has `bits`, as it is stored."""
        values, scales = self._read(name), self._read(f"{name}{SCALES}")
        if values.dtype == torch.uint8:
            groups = values.reshape(len(values), -1, GROUP // 2)
            nibbles = torch.cat([groups & 15, groups >> 4], dim=-1)
            values = (nibbles.to(torch.int8) - 8).flatten(1)
        return QuantisedMatrix(values, scales)

    def read(self, name: str) -> Tensor:
        """Return a parameter in floating point, dequantised."""
        if self.bits(name) is None:
            return self._read(name)
        values, scales = self.quantised(name)
        groups = values.float().reshape(*scales.shape, GROUP)
        return (groups * scales.float()[..., None]).flatten(1)

    def _read(self, name: str) -> Tensor:
        path = self._stored[name][0]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise InvalidModel(f"{path} cannot be read: {error}") from error
        return tensor


def quantise_matrix(matrix: Float[Tensor, "outputs inputs"], bits: int) -> QuantisedMatrix:
    """Round a matrix to integers times an fp16 scale per output and group of 32 inputs.

    In 4 bits the scale is the one of least squared error among a few, and may be negative, since
    the integers go from -8 to 7.
    """
    groups = matrix.float().reshape(len(matrix), -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    most, top = torch.maximum(-low, high), 127 if bits == 8 else 7
    sign = torch.where((high > -low) & torch.tensor(bits == 4), -1.0, 1.0)
    least = torch.full_like(most, torch.inf)
    best_scale = torch.zeros_like(most)
    best = torch.zeros_like(groups)
    for tried in range(1 if bits == 8 else NUM_TRIED):
        scale = (sign * most / (top + 0.375 * tried)).half().float()
        inverse = torch.where(scale != 0, 1 / scale, 0.0)
        values = (groups * inverse[..., None]).round().clamp(-top if bits == 8 else -8, top)
        error = (values * scale[..., None] - groups).square().sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        best_scale = torch.where(better, scale, best_scale)
        best = torch.where(better[..., None], values, best)
    return QuantisedMatrix(best.to(torch.int8).flatten(1), best_scale.half())


def stored_tensors(name: str, matrix: QuantisedMatrix, bits: int) -> dict[str, Tensor]:
    """Return the tensors of a quantised matrix as they are written to a file."""
    values = matrix.values
    if bits == 4:
        groups = (values + 8).to(torch.uint8).reshape(len(values), -1, GROUP)
        low, high = groups.chunk(2, dim=-1)
        values = (low | high << 4).flatten(1)
    return {name: values.contiguous(), f"{name}{SCALES}": matrix.scales.contiguous()}
