"""GGUF files: a check of every length in the header, then settings, tensors and arrays.

The header is walked here within limits, because a file may claim sizes that it does not have.
Blocks are dequantised by the `gguf` package; names and the order of rows become those of
transformers.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.cache import hash_of
from forerun.errors import InvalidModel
from forerun.models.architecture import MAX_LAYERS, checked_size
from forerun.models.decoder import (
    BlockFormat,
    QuantisedMatrix,
    StoredWeights,
    join_formats,
    list_fused,
)
from forerun.models.families import FAMILIES, find_by_gguf
from forerun.models.family import Family
from forerun.models.gguf.blocks import FORMATS, ROUNDED, unpack_integers
from forerun.models.gguf.settings import (
    END_NAMES,
    SINGLE_EXPERT_NAMES,
    find_ignored,
    get_gguf_parts,
    list_expert_parts,
    list_modules,
    translate_settings,
    undo_rounding,
)

MAX_HEADER_BYTES = 256 << 20
MAX_SETTINGS = 1 << 12
MAX_TENSORS = 1 << 14
"""The largest published files have a few thousand."""
MAX_ELEMENTS = 2_000_000
"""Elements of all arrays together; a vocabulary of 262,144 tokens has 1.3 million."""
MAX_SHORT_ARRAY = MAX_LAYERS
"""Elements of an array of numbers that is a setting, with one for every layer."""
MAX_NAME_BYTES = 1 << 12
MAX_TEXT_BYTES = 1 << 22
MAX_DIMENSIONS = 4
SCALARS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
"""Format for `struct` of a metadata type."""
TEXT, ARRAY = 8, 9
PLAIN = ("F32", "F16", "BF16")
TYPES = (
    *PLAIN,
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"),
    *("IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)
"""The types that the `gguf` package dequantises."""
ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
NOT_PARAMETERS = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)
LAYER_NAME = re.compile(r"blk\.(\d{1,5})\.(\w+)(?:\.(\d{1,5}))?\.(weight|bias)", re.ASCII)


class StoredArray(NamedTuple):
    """An array of the metadata: the type of its elements, their number and first byte."""

    kind: int
    length: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Place and type of a tensor: its shape as in torch, its first byte and number of bytes.

    Attributes:
        paired_heads: number of heads of which pairs of rows are rotated together; 0: of none.
        offset: what was added to the values.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    start: int
    num_bytes: int
    paired_heads: int = 0
    offset: float = 0.0

    def rows(self, first: int, last: int) -> StoredTensor:
        """Return the part of some rows, or of some experts."""
        row_bytes = self.num_bytes // self.shape[0]
        return replace(
            self,
            shape=(last - first, *self.shape[1:]),
            start=self.start + first * row_bytes,
            num_bytes=(last - first) * row_bytes,
        )


class _Header:
    """A position in a GGUF header, which never reads past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0
        self.num_elements = 0

    def error(self, reason: str) -> InvalidModel:
        return InvalidModel(f"{self.path} is no valid GGUF file: {reason}; fetch it again")

    def numbers(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{form}")
        values = struct.unpack(f"<{form}", self._take(size))
        return values

    def _take(self, size: int) -> bytes:
        end = self.position + size
        if end > min(len(self.data), MAX_HEADER_BYTES):
            raise self.error(
                f"its header ends at byte {min(len(self.data), MAX_HEADER_BYTES)}, and "
                f"{size} bytes from {self.position} on are declared"
            )
        content = self.data[self.position : end]
        self.position = end
        return content

    def text(self, max_bytes: int) -> str:
        (size,) = self.numbers("Q")
        if size > max_bytes:
            raise self.error(f"a text of {size} bytes is declared; at most {max_bytes} are read")
        try:
            return self._take(size).decode()
        except UnicodeDecodeError as error:
            raise self.error(f"a text is not UTF-8 ({error})") from error

    def value(self) -> Any:
        """Read a value of the metadata: long arrays and those of texts only as `StoredArray`."""
        (kind,) = self.numbers("I")
        if kind in SCALARS:
            return self.numbers(SCALARS[kind])[0]
        if kind == TEXT:
            return self.text(MAX_TEXT_BYTES)
        if kind != ARRAY:
            raise self.error(f"the metadata have a value of the unknown type {kind}")
        kind, length = self.numbers("IQ")
        self.num_elements += length
        if self.num_elements > MAX_ELEMENTS:
            raise self.error(f"its arrays have more than {MAX_ELEMENTS} elements")
        array = StoredArray(kind, length, self.position)
        if kind in SCALARS:
            if length <= MAX_SHORT_ARRAY:
                return self.numbers(f"{length}{SCALARS[kind]}")
            self._take(length * struct.calcsize(SCALARS[kind]))
        elif kind == TEXT:
            self._pass_texts(length)
        else:
            raise self.error(f"the metadata have an array of the type {kind}")
        return array

    def _pass_texts(self, length: int) -> None:
        data, position = self.data, self.position
        end = min(len(data), MAX_HEADER_BYTES)
        for _ in range(length):
            if position + 8 > end:
                break
            size = int.from_bytes(data[position : position + 8], "little")
            if size > MAX_NAME_BYTES:
                raise self.error(f"a text of {size} bytes is declared in an array")
            position += 8 + size
        if position > end or length * 8 > end - self.position:
            raise self.error(f"{length} texts from byte {self.position} on are declared")
        self.position = position

    def elements(self, array: StoredArray) -> list[Any]:
        """Return the elements of an array that `value` has passed."""
        self.position = array.position
        if array.kind == TEXT:
            return [self.text(MAX_NAME_BYTES) for _ in range(array.length)]
        return list(self.numbers(f"{array.length}{SCALARS[array.kind]}"))


class GGUFFile(StoredWeights):
    """A checked GGUF file of a supported architecture; its tensors have transformers' names.

    Raises:
        InvalidModel: it is truncated, malformed, or needs what is not supported.
    """

    is_packed = True

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise InvalidModel(f"{path} cannot be read: {error}") from error
        header = _Header(path, self._data)
        magic, version = header._take(4), header.numbers("I")[0]
        if magic != b"GGUF" or version not in (2, 3):
            raise header.error(f"it begins with {magic!r} and version {version}")
        num_tensors, num_entries = header.numbers("QQ")
        if num_tensors > MAX_TENSORS or num_entries > MAX_SETTINGS:
            raise header.error(
                f"it declares {num_tensors} tensors and {num_entries} settings; at most "
                f"{MAX_TENSORS} and {MAX_SETTINGS} are read"
            )
        self.metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            name = header.text(MAX_NAME_BYTES)
            if name in self.metadata:
                raise header.error(f"it has {name:.60} twice")
            self.metadata[name] = header.value()
        self._header = header
        architecture = self.metadata.get("general.architecture")
        prefix = f"{architecture}."
        self.stored_settings: Mapping[str, Any] = {
            key.removeprefix(prefix): value
            for key, value in self.metadata.items()
            if key.startswith(prefix)
        }
        self.family = self._read_family(architecture)
        self.form, self._variant = get_gguf_parts(self.family)
        self._stored = self._read_places(header, num_tensors)

    def _read_places(self, header: _Header, num_tensors: int) -> list[StoredTensor]:
        """Read the table of tensors; their bytes must lie in the file, one after another."""
        table = [self._read_entry(header) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment not in (1 << n for n in range(3, 17)):
            raise header.error(f"its alignment is {alignment!r:.40}")
        self.header_bytes = header.position
        begin = -(-header.position // alignment) * alignment
        found, end = [], begin
        for name, shape, type_name, offset in sorted(table, key=lambda entry: entry[3]):
            num_bytes = _count_bytes(header, name, shape, type_name)
            start = begin + offset
            if offset % alignment or start < end or start + num_bytes > len(self._data):
                raise header.error(
                    f"{name:.60} takes {num_bytes} bytes from {start} on, which overlap another "
                    f"tensor, are not aligned or lie outside of its {len(self._data)} bytes"
                )
            found.append(
                StoredTensor(
                    name=name, shape=shape, type_name=type_name, start=start, num_bytes=num_bytes
                )
            )
            end = start + num_bytes
        if len({tensor.name for tensor in found}) != num_tensors:
            raise header.error("it has two tensors of one name")
        return found

    def _read_entry(self, header: _Header) -> tuple[str, tuple[int, ...], str, int]:
        from gguf import GGMLQuantizationType

        name = header.text(MAX_NAME_BYTES)
        (num_dimensions,) = header.numbers("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise header.error(f"{name:.60} has {num_dimensions} dimensions")
        shape = header.numbers(f"{num_dimensions}Q")[::-1]
        kind, offset = header.numbers("IQ")
        try:
            type_name = GGMLQuantizationType(kind).name
        except ValueError:
            type_name = f"number {kind}"
        if type_name not in TYPES:
            raise InvalidModel(
                f"{self.path} stores {name:.60} as {type_name}, which is not supported; supported "
                f"are {', '.join(TYPES)}"
            )
        return name, shape, type_name, offset

    def _read_family(self, architecture: object) -> Family:
        """Refuse an architecture or a setting that would change the output and is not honoured."""
        if (count := self.metadata.get("split.count", 0)) not in (0, 1):
            raise InvalidModel(
                f"{self.path} is one of {count!r:.20} parts of a model; join them with llama.cpp's "
                "`llama-gguf-split --merge FIRST_PART WHOLE.gguf` and give the whole file"
            )
        named = architecture if isinstance(architecture, str) else ""
        if (family := find_by_gguf(named, self.stored_settings)) is None:
            rows = (row.gguf for row in FAMILIES.values())
            names = ", ".join(dict.fromkeys(form.architecture for form in rows if form))
            raise InvalidModel(
                f"{self.path} has the architecture {architecture!r:.60}; GGUF files are read of "
                f"{names}: of others give the model in its original form, {self._origin}"
            )
        if (found := find_ignored(get_gguf_parts(family)[0], self.stored_settings)) is not None:
            key, value = found
            shown = f"an array of {value.length}" if isinstance(value, StoredArray) else value
            raise InvalidModel(
                f"{self.path} sets {named}.{key:.60}={shown!r:.60}, which is not honoured; give "
                f"the model in its original form, {self._origin}"
            )
        return family

    @property
    def _origin(self) -> str:
        """Where the model came from, as the file says."""
        for key in ("general.source.huggingface.repository", "general.base_model.0.repo_url"):
            url = self.metadata.get(key)
            name = url.removeprefix("https://huggingface.co/") if isinstance(url, str) else ""
            if re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", name, re.ASCII):
                return f"--model {name}"
        return "a folder with config.json and *.safetensors"

    @property
    def architecture(self) -> str:
        return self.family.name

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings for transformers' configuration class (InvalidModel)."""
        by_name = {tensor.name: tensor for tensor in self._stored}
        embedding = by_name.get("token_embd.weight")
        if embedding is None:
            raise InvalidModel(f"{self.path} has no embedding (token_embd.weight); fetch it again")
        factors = [by_name[n] for n in (SHORT_FACTORS, LONG_FACTORS) if n in by_name]
        listed = [self._dequantise(tensor).reshape(-1) for tensor in factors]
        special = {f"{role}_token_id": self.token_id(role) for role in ("bos", "eos")}
        special["pad_token_id"] = self.token_id("padding")
        try:
            return special | translate_settings(
                self.family,
                self.stored_settings,
                vocab_size=embedding.shape[0],
                has_head="output.weight" in by_name,
                has_biases=any(f"blk.0.{part}.bias" in by_name for part in ("attn_q", "attn_qkv")),
                rope_factors=[[undo_rounding(float(n)) for n in each] for each in listed],
            )
        except (InvalidModel, TypeError, ValueError, ArithmeticError) as error:
            raise InvalidModel(f"the settings in {self.path} cannot be used: {error}") from error

    def config(self) -> Any:
        """Return transformers' configuration of the model."""
        from transformers import AutoConfig  # takes seconds

        return AutoConfig.for_model(self.family.model_type, **self.settings)

    def array(self, key: str) -> list[Any]:
        """Return the elements of an array of the metadata; an empty list where there is none."""
        found = self.metadata.get(key, ())
        if isinstance(found, StoredArray):
            return self._header.elements(found)
        return list(found) if isinstance(found, tuple) else []

    def token_id(self, role: str) -> int | None:
        """Return the id of a special token, such as "eos"; None where the file names none."""
        found = self.metadata.get(f"tokenizer.ggml.{role}_token_id")
        return found if type(found) is int and found >= 0 else None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text, a turn or a message."""
        found = (self.token_id(role) for role in ("eos", "eot", "eom"))
        return frozenset(token for token in found if token is not None)

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Tensors by their names in transformers; unknown ones keep their own."""
        return {
            name: part
            for tensor in self._stored
            if tensor.name not in NOT_PARAMETERS
            for name, part in self._find_parts(tensor)
        }

    @property
    def names(self) -> Collection[str]:
        return self.tensors

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @cached_property
    def _modules(self) -> dict[str, str]:
        return list_modules(self._variant)

    def _find_parts(self, tensor: StoredTensor) -> list[tuple[str, StoredTensor]]:
        """Return the parameters in a tensor by their names in transformers."""
        offset = float(self._variant.one_plus_norms and "norm" in tensor.name)
        tensor = replace(tensor, offset=offset)
        if (found := LAYER_NAME.fullmatch(tensor.name)) is None:
            stem, _, kind = tensor.name.rpartition(".")
            return [(f"{END_NAMES[stem]}.{kind}" if stem in END_NAMES else tensor.name, tensor)]
        layer, short, expert, kind = found.groups()
        prefix, experts = f"model.layers.{int(layer)}.", list_expert_parts(self._variant)
        if expert is not None and short in SINGLE_EXPERT_NAMES and experts:
            part = experts[f"{short}_exps"].format(int(expert))
            return [(f"{prefix}{part}.{kind}", tensor)]
        if short in experts and expert is None and len(tensor.shape) == 3:
            return [
                (
                    f"{prefix}{experts[short].format(n)}.{kind}",
                    replace(tensor.rows(n, n + 1), shape=tensor.shape[1:]),
                )
                for n in range(tensor.shape[0])
            ]
        if short == "attn_qkv" and "attn_qkv" not in self._modules:
            return [(f"{prefix}{module}.{kind}", part) for module, part in self._split_qkv(tensor)]
        if expert is not None or short not in self._modules:
            return [(tensor.name, tensor)]
        module = self._modules[short]
        return [(f"{prefix}{module}.{kind}", self._mark_pairs(tensor, module))]

    def _split_qkv(self, tensor: StoredTensor) -> list[tuple[str, StoredTensor]]:
        """Return the rows of queries, keys and values in one tensor, by their modules."""
        width, modules = self.settings["head_dim"], self._variant.parts[0]
        queries, keys = (self.settings[f"num_{n}_heads"] for n in ("attention", "key_value"))
        ends = [width * num_heads for num_heads in (queries, queries + keys, queries + 2 * keys)]
        if ends[-1] != tensor.shape[0]:
            raise InvalidModel(
                f"{self.path} has {tensor.shape[0]} rows in {tensor.name:.60}; {queries} heads of "
                f"queries and {keys} of keys and values, of {width} rows each, need {ends[-1]}"
            )
        return [
            (module, self._mark_pairs(tensor.rows(first, last), module))
            for module, (first, last) in zip(modules, pairwise((0, *ends)), strict=True)
        ]

    def _mark_pairs(self, tensor: StoredTensor, module: str) -> StoredTensor:
        """Note where rows of heads lie in pairs, as files of some families have them."""
        heads = {
            "self_attn.q_proj": "num_attention_heads",
            "self_attn.k_proj": "num_key_value_heads",
        }.get(module)
        if heads is None or not self.form.paired_rows:
            return tensor
        num_heads = checked_size(self.settings[heads], heads)
        if tensor.shape[0] % (2 * num_heads):
            raise InvalidModel(f"{self.path} has {num_heads} heads of {tensor.shape[0]} rows")
        return replace(tensor, paired_heads=num_heads)

    @property
    def type_counts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for tensor in self.tensors.values():
            counts[tensor.type_name] += math.prod(tensor.shape)
        return counts

    @property
    def rope_factors(self) -> Tensor | None:
        """Divisors of the rotation of every pair of a head, fp32; None without scaling."""
        found = [tensor for tensor in self._stored if tensor.name == ROPE_FACTORS]
        return torch.from_numpy(self._dequantise(found[0])) if found else None

    def read(self, name: str) -> Tensor:
        """Return a parameter in fp32, dequantised."""
        tensor = self.tensors[name]
        values = torch.from_numpy(_reorder_rows(tensor, self._dequantise(tensor)))
        return values - tensor.offset if tensor.offset else values

    def groups(self, name: str) -> BlockFormat | None:
        """Return the groups in which a matrix can be kept as integers; None for others."""
        tensor = self.tensors.get(name)
        return None if tensor is None or len(tensor.shape) != 2 else FORMATS.get(tensor.type_name)

    @cached_property
    def notice(self) -> str | None:
        """A line about types that are not kept as stored, and a tokenizer without a split rule."""
        packed: set[str] = set()
        dequantised: set[str] = set()
        for name, tensor in self.tensors.items():
            if len(tensor.shape) != 2 or tensor.type_name in PLAIN:
                continue
            is_kept = join_formats(self, list_fused(name)) is not None
            (packed if is_kept else dequantised).add(tensor.type_name)
        rounded = ", ".join(sorted(packed & {*ROUNDED}))
        wider = [name for name in sorted(packed) if FORMATS[name].bits == 8 and name != "Q8_0"]
        parts = [f"scales of {rounded} are rounded to fp16"] if rounded else []
        parts += [f"{name} takes {FORMATS[name].bits_per_weight:g} bits a weight" for name in wider]
        if dequantised:
            parts.append(f"{', '.join(sorted(dequantised))} is dequantised")
        has_rule = "tokenizer.ggml.pre" in self.metadata
        if self.metadata.get("tokenizer.ggml.model") == "gpt2" and not has_rule:
            parts.append("it names no rule by which texts are split; `default` is used")
        return f"{self.path.name}: {'; '.join(parts)} (docs/quantised.md)" if parts else None

    def quantised(self, name: str) -> QuantisedMatrix:
        """Return the integers, scales and minima of a matrix that has `groups`."""
        tensor = self.tensors[name]
        blocks = self._bytes(tensor).reshape(tensor.shape[0], -1)
        parts = unpack_integers(blocks, tensor.type_name, tensor.shape)
        if not all(np.isfinite(part).all() for part in parts[1:]):
            raise InvalidModel(
                f"{self.path} has scales in {tensor.name:.60} that are NaN or infinite, or too "
                "large for fp16; fetch it again, or give dtype float32"
            )
        return QuantisedMatrix(*(torch.from_numpy(_reorder_rows(tensor, part)) for part in parts))

    def _dequantise(self, tensor: StoredTensor) -> np.ndarray:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        if tensor.type_name in ("F32", "F16"):
            stored = self._bytes(tensor).view(f"<f{2 if tensor.type_name == 'F16' else 4}")
            return stored.astype(np.float32).reshape(tensor.shape)
        kind = GGMLQuantizationType[tensor.type_name]
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = tensor.shape[-1] // per_block * block_bytes
        with np.errstate(all="ignore"):  # scales that are no numbers are refused by a test pass
            rows = dequantize(self._bytes(tensor).reshape(*tensor.shape[:-1], row_bytes), kind)
        return np.asarray(rows, dtype=np.float32).reshape(tensor.shape)

    def _bytes(self, tensor: StoredTensor) -> np.ndarray:
        return np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.start)

    @property
    def header_hash(self) -> str:
        """Hash of configuration, tokenizer and places of the tensors."""
        return hash_of(self._data[: self.header_bytes])

    def sample(self, num_bytes: int) -> bytes:
        """Return the header's hash and so many bytes from the middle of every tensor."""
        middles = [
            self._data[start : start + min(num_bytes, tensor.num_bytes)]
            for tensor in self._stored
            for start in (tensor.start + max(0, tensor.num_bytes - num_bytes) // 2,)
        ]
        return self.header_hash.encode() + b"".join(middles)


def _reorder_rows(tensor: StoredTensor, rows: np.ndarray) -> np.ndarray:
    """Return rows in the order of transformers, which rotates the halves of a head."""
    if not tensor.paired_heads:
        return np.ascontiguousarray(rows)
    pairs = rows.reshape(tensor.paired_heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def _count_bytes(header: _Header, name: str, shape: tuple[int, ...], type_name: str) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    if 0 in shape or shape[-1] % per_block:
        raise header.error(f"{name:.60} of type {type_name} has the shape {list(shape)}")
    return math.prod(shape) // per_block * block_bytes


@lru_cache(maxsize=4)
def _open_unchanged(path: Path, modified_ns: int, size_bytes: int) -> GGUFFile:
    return GGUFFile(path)


def open_gguf(path: Path) -> GGUFFile:
    """Return a checked GGUF file; one that has not changed is checked once."""
    try:
        found = path.stat()
    except OSError as error:
        raise InvalidModel(f"{path} cannot be read: {error}") from error
    return _open_unchanged(path, found.st_mtime_ns, found.st_size)
