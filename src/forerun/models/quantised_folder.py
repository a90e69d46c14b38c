"""Model folders with matrices of 8 and 4 bits, in forerun's own format and three others.

As `forerun quantise` writes them, a matrix NAME in 8 bits is int8 (outputs, inputs); in 4 bits it
is uint8 (outputs, inputs / 2), the first half of a group of 32 in the low nibbles, with 8 added.
NAME_scales has an fp16 scale per output and group of 32 inputs. Everything else is stored as in
the model that was quantised.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.errors import InvalidModel
from forerun.models.decoder import BlockFormat, QuantisedMatrix
from forerun.models.stored_tensors import FloatWeights, read_header, read_stored

METHOD = "forerun"
"""Value of quant_method in the quantization_config of config.json."""
GROUP = 32
SCALES = "_scales"
FLOATS = ("BF16", "F16", "F32")
EMBEDDING = "model.embed_tokens.weight"
QUANTISED_HEAD = "lm_head.weight"
NUM_TRIED = 9
"""Number of scales tried per group of 4 bits, from that of the largest weight down."""


class QuantisedFolder(FloatWeights):
    """The tensors of a quantised folder; their headers have been checked."""

    is_packed = True
    notice: str | None = None
    """Message for the user on matrices that are dequantised while read; None if none is."""

    @cached_property
    def _stored(self) -> Mapping[str, tuple[Path, tuple[int, ...], str]]:
        headers = {path: read_header(path) for path in self.files}
        return {
            name: (path, *part) for path, parts in headers.items() for name, part in parts.items()
        }

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the parameters; raises InvalidModel for scales that do not fit."""
        found = {}
        for name, (path, shape, _) in self._stored.items():
            if name.endswith(SCALES):
                continue
            bits = self.bits(name)
            if bits is not None:
                shape = (shape[0], shape[-1] * 8 // bits)
                scales = self._stored.get(f"{name}{SCALES}")
                fits = (shape[0], shape[1] // GROUP), "F16"
                if scales is None or scales[1:] != fits or shape[1] % GROUP:
                    raise InvalidModel(f"{path} has no scales that fit {name:.80}: fetch it again")
            else:
                self._check_float(name)
            found[name] = shape
        return found

    @cached_property
    def type_counts(self) -> Counter[str]:
        """Number of parameters by `get_stored_type`."""
        counts: Counter[str] = Counter()
        for name, shape in self.shapes.items():
            counts[self.get_stored_type(name)] += math.prod(shape)
        return counts

    def _check_float(self, name: str) -> None:
        path, _, dtype = self._stored[name]
        if dtype not in FLOATS:
            raise InvalidModel(f"{path} stores {name:.80} as {dtype}, which is not supported")

    def bits(self, name: str) -> int | None:
        """Return the bits of a matrix; None for what is stored in floating point."""
        if name not in self._stored:
            return None
        _, shape, dtype = self._stored[name]
        return {"I8": 8, "U8": 4}.get(dtype) if len(shape) == 2 else None

    def groups(self, name: str) -> BlockFormat | None:
        """Return the format of a matrix that has `bits`; None for others."""
        bits = self.bits(name)
        return None if bits is None else BlockFormat(bits)

    def get_stored_type(self, name: str) -> str:
        """Return the storage format of a parameter, for messages."""
        bits = self.bits(name)
        return "other" if bits is None else f"int{bits}"

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
        values, scales, _ = self.quantised(name)
        groups = values.float().reshape(*scales.shape, GROUP)
        return (groups * scales.float()[..., None]).flatten(1)

    def _read(self, name: str) -> Tensor:
        return read_stored(self._stored[name][0], name)


METHODS = ("awq", "compressed-tensors", "gptq")
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of an int32 that holds each of eight neighbouring outputs."""
PARTS = "qweight qzeros scales g_idx weight_packed weight_scale weight_shape weight_g_idx".split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Storage format of the matrices in a folder that another system quantised.

    Attributes:
        group: inputs with a common scale; None: all inputs of an output.
        zero_offset: what is added to stored zero points.
        symmetric: the zero point is the middle of the range, however it is stored. Some folders
            name the older `checkpoint_format`, which stores one less, and store the middle itself.
    """

    method: str
    bits: int
    group: int | None
    zero_offset: int = 0
    symmetric: bool = False


def read_scheme(where: Path, settings: Mapping[str, Any]) -> Scheme:
    """Read `quantization_config`; raises InvalidModel for what is not supported."""
    method = settings.get("quant_method")
    if method not in METHODS:
        raise InvalidModel(
            f"quantised checkpoints ({method!r:.40}) are not supported in {where}; read are "
            f"{', '.join(METHODS)}: use one of these, a GGUF file, or bf16 or fp32 weights"
        )
    offset, symmetric = 0, method == "gptq" and settings.get("sym") is True
    if method == "compressed-tensors":
        weights = _read_compressed(where, settings)
        bits, group = weights.get("num_bits"), weights.get("group_size")
    else:
        bits, group = settings.get("bits"), settings.get("group_size")
        form = settings.get("version" if method == "awq" else "checkpoint_format")
        forms = ("gemm", "GEMM") if method == "awq" else ("gptq", "gptq_v2")
        _check_setting(where, f"{method} packing", form or forms[0], forms)
        overrides = settings.get("dynamic") or {}
        if not isinstance(overrides, Mapping) or any(key[:2] != "-:" for key in overrides):
            raise InvalidModel(f"{where} has settings per module (dynamic), not supported here")
        offset = 1 if form in (None, "gptq") and method == "gptq" else 0
    _check_setting(where, f"{method} bits", bits, (4,) if method == "awq" else (4, 8))
    if group not in (None, -1) and (type(group) is not int or not 1 <= group <= 1 << 20):
        raise InvalidModel(f"{where} has group_size {group!r:.40}; give -1 or a positive number")
    group = None if group in (None, -1) else group
    return Scheme(
        method=str(method),
        bits=int(bits or 0),
        group=group,
        zero_offset=offset,
        symmetric=symmetric,
    )


def _check_setting(where: Path, what: str, value: Any, known: tuple[Any, ...]) -> None:
    if type(value) not in (int, str) or value not in known:
        raise InvalidModel(
            f"{where} has {what} {value!r:.40}; supported: {', '.join(map(str, known))}. "
            "Use another quantised version of the model, or its bf16 or fp32 weights"
        )


def _read_compressed(where: Path, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the one description of weights in a compressed-tensors configuration."""
    groups = settings.get("config_groups")
    given = list(groups.values()) if isinstance(groups, Mapping) else []
    listed = [group for group in given if isinstance(group, Mapping)]
    found = [group.get("weights") for group in listed]
    weights = found[0] if found else None
    if not isinstance(weights, Mapping) or any(other != weights for other in found):
        raise InvalidModel(f"{where} needs one form of weights in config_groups, not {len(found)}")
    bits = weights.get("num_bits")
    forms = ("pack-quantized", "int-quantized") if bits == 8 else ("pack-quantized",)
    _check_setting(where, "compressed-tensors format", settings.get("format"), forms)
    _check_setting(where, "weights of the type", weights.get("type", "int"), ("int",))
    _check_setting(
        where, "weights by strategy", weights.get("strategy"), ("group", "channel", "tensor")
    )
    sparsity = settings.get("sparsity_config") or {"format": "dense"}
    activations = [group["input_activations"] for group in listed if group.get("input_activations")]
    static = [a for a in activations if not isinstance(a, Mapping) or a.get("dynamic") is not True]
    objections = {
        "weights with zero points (symmetric is false)": not weights.get("symmetric", True),
        "keys and values in fewer bits (kv_cache_scheme)": settings.get("kv_cache_scheme"),
        "sparse weights (sparsity_config)": (
            not isinstance(sparsity, Mapping) or sparsity.get("format") != "dense"
        ),
        "activations with fixed scales (input_activations)": static,
    }
    for objection, holds in objections.items():
        if holds:
            raise InvalidModel(f"{where} has {objection}, not supported; use its bf16 weights")
    return weights


class PackedFolder(QuantisedFolder):
    """A folder of GPTQ, AWQ (GEMM) or compressed-tensors; headers and scales have been checked.

    A matrix is kept in integers if that is exact: its groups are multiples of 32 inputs in order,
    and it has no zero points and scales that fp16 represents. Other matrices are dequantised one by
    one while they are read.
    """

    def __init__(self, files: tuple[Path, ...], scheme: Scheme) -> None:
        super().__init__(files)
        self.scheme = scheme
        compressed = scheme.method == "compressed-tensors"
        self.scales_part = "weight_scale" if compressed else "scales"
        self.modules = {
            module: f"{module}.{part}"
            for module, _, part in (name.rpartition(".") for name in self._stored)
            if part in ("qweight", "weight_packed")
            or (part == "weight" and self._stored[f"{module}.weight"][2] == "I8")
        }
        self._sizes = {module: self._read_size(module) for module in self.modules}
        self._kept = {f"{module}.weight": self._check(module) for module in self.modules}
        biases = {f"{module}.bias" for module in self.modules} & self._stored.keys()
        self.zero_biases = frozenset(name for name in biases if not self._read(name).any())
        if number := sum(not kept for kept in self._kept.values()):
            self.notice = (
                f"{number} of {len(self._kept)} {scheme.method} matrices in {files[0].parent} are "
                "dequantised while they are read: they have zero points, another order of "
                "inputs, groups of other than whole 32 inputs, or are experts"
            )

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {
            f"{module}.weight": size for module, size in self._sizes.items()
        }
        for name, (_, shape, _) in self._stored.items():
            module, _, part = name.rpartition(".")
            if name in found or (module in self.modules and part in PARTS):
                continue
            self._check_float(name)
            found[name] = shape
        return found

    def get_stored_type(self, name: str) -> str:
        if name not in self._kept:
            return "other"
        path = "kept packed" if self._kept[name] else "dequantised while read"
        return f"{self.scheme.method} int{self.scheme.bits} ({path})"

    def bits(self, name: str) -> int | None:
        return self.scheme.bits if self._kept.get(name) else None

    def quantised(self, name: str) -> QuantisedMatrix:
        module = name.removesuffix(".weight")
        values, scales = self._read_integers(module), self._read_scales(module)
        times = values.shape[1] // GROUP // scales.shape[1]
        return QuantisedMatrix(values, scales.half().repeat_interleave(times, dim=1))

    def read(self, name: str) -> Tensor:
        module = name.removesuffix(".weight")
        if module not in self.modules:
            return self._read(name)
        groups = self._read_groups(module)
        values = self._read_integers(module).float()
        if (zeros := self._read_zeros(module)) is not None:
            values -= zeros[:, groups]
        return values * self._read_scales(module).float()[:, groups]

    def _read_size(self, module: str) -> tuple[int, int]:
        """Check how a matrix is stored; returns its outputs and inputs."""
        _, shape, dtype = self._stored[self.modules[module]]
        if len(shape) != 2 or dtype != ("I8" if self._is_plain(module) else "I32"):
            raise self._error(self.modules[module], f"is {dtype} of shape {list(shape)}")
        per_word = 32 // self.scheme.bits
        first, second = shape
        if self._is_plain(module):
            return first, second
        if self.scheme.method == "gptq":
            return second, first * per_word
        if self.scheme.method == "awq":
            return second * per_word, first
        stored = self._read_part(module, "weight_shape").flatten().tolist()
        if stored[:1] != [first] or len(stored) != 2 or -(-stored[1] // per_word) != second:
            raise self._error(f"{module}.weight_shape", f"is {stored!r:.60}, packed {list(shape)}")
        return first, int(stored[1])

    def _is_plain(self, module: str) -> bool:
        return self.modules[module].endswith(".weight")

    def _check(self, module: str) -> bool:
        """Check what belongs to a matrix; returns whether it is kept in integers."""
        outputs, inputs = self._sizes[module]
        bits, group = self.scheme.bits, self.scheme.group or inputs
        groups = -(-inputs // group)
        wanted: dict[str, tuple[int, ...]] = {self.scales_part: (groups, outputs)}
        if self.scheme.method == "compressed-tensors":
            wanted = {self.scales_part: (outputs, groups)}
            if self._stored.get(f"{module}.{self.scales_part}", (0, ()))[1] == (1,):
                wanted = {self.scales_part: (1,)}
        else:
            wanted["qzeros"] = (groups, outputs * bits // 32)
        for part, shape in wanted.items():
            _, found, dtype = self._get_header(module, part)
            if found != shape or dtype not in (("I32",) if part == "qzeros" else FLOATS):
                raise self._error(
                    f"{module}.{part}",
                    f"is {dtype} of shape {list(found)}; {list(shape)} is needed",
                )
        scales, index = self._read_scales(module), self._read_groups(module)
        wrong = ~scales.isfinite() | (scales == 0)
        if wrong.any():
            value = float(scales[wrong][0])
            raise self._error(f"{module}.{self.scales_part}", f"holds {value}, no usable scale")
        if not 0 <= int(index.min()) <= int(index.max()) < groups:
            worst = int(index.max()) if int(index.max()) >= groups else int(index.min())
            raise self._error(f"{module}.g_idx", f"names group {worst} of {groups}")
        zeros = self._read_zeros(module)
        return (
            ".experts." not in module
            and inputs % GROUP == 0
            and inputs % group == 0
            and group % GROUP == 0
            and (zeros is None or not bool(zeros.any()))
            and torch.equal(index, torch.arange(inputs) // group)
            and torch.equal(scales.half().float(), scales.float())
        )

    def _error(self, name: str, reason: str) -> InvalidModel:
        where = self.files[0].parent
        return InvalidModel(
            f"{name:.100} {reason} ({self.scheme.method} in {where}): fetch the folder again, or "
            "correct quantization_config in its config.json"
        )

    def _read_scales(self, module: str) -> Tensor:
        scales = self._read_part(module, self.scales_part)
        if self.scheme.method != "compressed-tensors":
            return scales.t()
        return scales.expand(self._sizes[module][0], 1) if scales.dim() == 1 else scales

    def _read_groups(self, module: str) -> Tensor:
        """Return the group of every input."""
        inputs = self._sizes[module][1]
        part = "weight_g_idx" if self.scheme.method == "compressed-tensors" else "g_idx"
        if f"{module}.{part}" not in self._stored:
            return torch.arange(inputs) // (self.scheme.group or inputs)
        index = self._read_part(module, part)
        if index.shape != (inputs,) or index.dtype not in (torch.int32, torch.int64):
            raise self._error(
                f"{module}.{part}", f"is {index.dtype} of shape {list(index.shape)}, not [{inputs}]"
            )
        return index.long()

    def _read_zeros(self, module: str) -> Tensor | None:
        """Return the zero points of (outputs, groups) less the middle of the range."""
        if self.scheme.method == "compressed-tensors":
            return None
        zeros, middle = self._unpack(self._read_part(module, "qzeros")), 1 << self.scheme.bits - 1
        if self.scheme.symmetric:
            if not any((zeros == stored).all() for stored in (middle - 1, middle)):
                raise self._error(
                    f"{module}.qzeros", f"holds zeros other than {middle} (sym: true)"
                )
            return None
        zeros = (zeros + self.scheme.zero_offset) & ((1 << self.scheme.bits) - 1)
        return (zeros - middle).t()

    def _read_integers(self, module: str) -> Tensor:
        """Return the values of (outputs, inputs) less the middle of the range, int8."""
        stored = self._read(self.modules[module])
        if self._is_plain(module):
            return stored
        if self.scheme.method == "gptq":
            values = self._unpack(stored.t().contiguous())
        elif self.scheme.method == "awq":
            values = self._unpack(stored).t()
        else:
            values = self._unpack(stored)[:, : self._sizes[module][1]]
        return (values - (1 << self.scheme.bits - 1)).to(torch.int8).contiguous()

    def _unpack(self, words: Tensor) -> Tensor:
        """Return the integers in the words of every row, int16."""
        bits = self.scheme.bits
        order = AWQ_ORDER if self.scheme.method == "awq" else range(32 // bits)
        parts = [(words >> bits * place & (1 << bits) - 1).short() for place in order]
        return torch.stack(parts, dim=-1).flatten(1)

    def _get_header(self, module: str, part: str) -> tuple[Path, tuple[int, ...], str]:
        name = f"{module}.{part}"
        if name not in self._stored:
            raise self._error(name, "is missing")
        return self._stored[name]

    def _read_part(self, module: str, part: str) -> Tensor:
        self._get_header(module, part)
        return self._read(f"{module}.{part}")


def open_quantised(
    where: Path, files: tuple[Path, ...], settings: Mapping[str, Any]
) -> QuantisedFolder:
    """Return a checked folder; a folder that has not changed is not checked again."""
    scheme = None if settings.get("quant_method") == METHOD else read_scheme(where, settings)
    found = [path.stat() for path in files]
    return _open_unchanged(files, tuple((file.st_mtime_ns, file.st_size) for file in found), scheme)


@lru_cache(maxsize=4)
def _open_unchanged(
    files: tuple[Path, ...], stamps: tuple[tuple[int, int], ...], scheme: Scheme | None
) -> QuantisedFolder:
    return QuantisedFolder(files) if scheme is None else PackedFolder(files, scheme)


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
