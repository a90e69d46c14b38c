"""GGUF files: a check of every length in the header, then tensors, configuration and tokenizer.

The header is walked here within limits, because a file may claim sizes that it does not have.
Blocks are dequantised by the `gguf` package; names and the order of rows become those of
transformers, which converts the metadata to a configuration and a tokenizer.
"""

from __future__ import annotations

import logging
import math
import mmap
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.cache import cache_folder, cached_json, hash_of
from forerun.errors import InvalidModel
from forerun.models.decoder import MATRIX_PARTS, QuantisedMatrix

logger = logging.getLogger("forerun.loading")

CLASSES: Mapping[str, str] = MappingProxyType(
    {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
)
"""The class in transformers of a GGUF architecture."""
KNOWN_KEYS = frozenset(
    "block_count context_length embedding_length feed_forward_length vocab_size rope.freq_base "
    "rope.dimension_count attention.head_count attention.head_count_kv attention.key_length "
    "attention.value_length attention.layer_norm_rms_epsilon".split()
)
"""Settings of an architecture that are honoured; any other one that is set is refused."""
KNOWN_SPLITS = ("default", "gpt-2")
"""Splits of a text before byte-level BPE that transformers implements without a pattern."""

MAX_HEADER_BYTES = 256 << 20
MAX_ENTRIES = 1 << 16
"""Metadata entries, and tensors."""
MAX_ELEMENTS = 2_000_000
"""Elements of all arrays together; a vocabulary of 262,144 tokens has 1.3 million."""
MAX_NAME_BYTES = 1 << 16
MAX_TEXT_BYTES = 1 << 22
MAX_DIMENSIONS = 4
SCALARS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
"""Format for `struct` of a metadata type."""
TEXT, ARRAY = 8, 9
PLAIN: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
BLOCKS: Mapping[str, int] = MappingProxyType({"Q8_0": 8, "Q4_0": 4})
"""Bits of the types whose groups of 32 are kept as they are by the native runner."""
TYPES = (*PLAIN, *BLOCKS, "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Place and type of a tensor: its shape as in torch, its first byte and number of bytes."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    start: int
    num_bytes: int


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
        """Read a value of the metadata; of an array only its length is returned."""
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
        if kind in SCALARS:
            self._take(length * struct.calcsize(SCALARS[kind]))
        elif kind == TEXT:
            for _ in range(length):
                self.text(MAX_NAME_BYTES)
        else:
            raise self.error(f"the metadata have an array of the type {kind}")
        return length


class GGUFFile:
    """A checked GGUF file of a supported architecture; its tensors have transformers' names.

    Raises:
        InvalidModel: it is truncated, malformed, or needs what is not supported.
    """

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
        if max(num_tensors, num_entries) > MAX_ENTRIES:
            raise header.error(f"it declares {num_tensors} tensors and {num_entries} settings")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            name = header.text(MAX_NAME_BYTES)
            if name in self.metadata:
                raise header.error(f"it has {name:.60} twice")
            self.metadata[name] = header.value()
        self._stored = self._read_places(header, num_tensors)
        self._check_settings()

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
            num_bytes = _num_bytes(header, name, shape, type_name)
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

    def _check_settings(self) -> None:
        """Refuse an architecture or a setting that would change the output and is not honoured."""
        architecture = self.metadata.get("general.architecture")
        if architecture not in CLASSES:
            raise InvalidModel(
                f"{self.path} has the architecture {architecture!r:.60}; GGUF files are read of "
                f"{', '.join(CLASSES)}: for others give a folder with *.safetensors"
            )
        for key, value in self.metadata.items():
            setting = key.removeprefix(f"{architecture}.")
            if setting != key and setting not in KNOWN_KEYS and value not in (0, "none"):
                raise InvalidModel(f"{self.path} sets {key:.60}={value!r:.60}, not supported here")
        widths = [
            self.metadata.get(f"{architecture}.{key}", None)
            for key in ("rope.dimension_count", "attention.key_length", "attention.value_length")
        ]
        if len({width for width in widths if width is not None}) > 1:
            raise InvalidModel(f"{self.path} has heads of several widths {widths}, not supported")
        split = self.metadata.get("tokenizer.ggml.pre", KNOWN_SPLITS[0])
        if self.metadata.get("tokenizer.ggml.model") == "gpt2" and split not in KNOWN_SPLITS:
            known = cached_json(
                cache_folder(), f"gguf-splits-{version('transformers')}", _splits_of_transformers
            )
            if split not in known["names"]:
                logger.warning(
                    "%s splits texts by the rule %r, which transformers does not know: its tokens "
                    "of a text may be others than in training",
                    *(self.path, split),
                )

    @property
    def architecture(self) -> str:
        return CLASSES[self.metadata["general.architecture"]]

    @property
    def head_dim(self) -> int | None:
        """Width of a head, where the file names it."""
        found = self.metadata.get(f"{self.metadata['general.architecture']}.attention.key_length")
        return found if type(found) is int else None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text or a turn."""
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        return frozenset(
            found for key in keys if type(found := self.metadata.get(key)) is int and found >= 0
        )

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Tensors by their names in transformers; unknown ones keep their own."""
        names = self._names()
        return {
            names.get(tensor.name, tensor.name): tensor
            for tensor in self._stored
            if tensor.name != ROPE_FACTORS
        }

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def _names(self) -> dict[str, str]:
        """Return the names of parameters in transformers by those in the file."""
        from gguf import MODEL_ARCH, get_tensor_name_map

        settings, architecture = self.metadata, self.metadata["general.architecture"]
        num_layers = settings.get(f"{architecture}.block_count", 0)
        if type(num_layers) is not int or not 0 <= num_layers <= len(self._stored):
            raise InvalidModel(f"{self.path} has {num_layers!r:.40} layers in its settings")
        known = get_tensor_name_map(MODEL_ARCH[architecture.upper()], num_layers)
        parts = [part for parts in MATRIX_PARTS for part in parts]
        parts += ["input_layernorm", "post_attention_layernorm"]
        parts += ["self_attn.q_norm", "self_attn.k_norm"]
        modules = ["model.embed_tokens", "model.norm", "lm_head"]
        modules += [f"model.layers.{n}.{part}" for n in range(num_layers) for part in parts]
        return {
            f"{short}.{kind}": f"{module}.{kind}"
            for module in modules
            if (short := known.get_name(module)) is not None
            for kind in ("weight", "bias")
        }

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
        return torch.from_numpy(self._dequantised(found[0])) if found else None

    def read(self, name: str) -> Tensor:
        """Return a parameter in fp32, dequantised."""
        return torch.from_numpy(self._in_order(self.tensors[name], self._dequantised))

    def bits(self, name: str) -> int | None:
        """Return the bits of a matrix in groups of 32 with one fp16 scale; None for others."""
        return BLOCKS.get(self.tensors[name].type_name) if name in self.tensors else None

    def quantised(self, name: str) -> QuantisedMatrix:
        """Return the integers and scales of a matrix that has `bits`, as they are stored."""
        tensor = self.tensors[name]
        values = self._in_order(tensor, lambda tensor: self._groups(tensor)[0])
        scales = self._in_order(tensor, lambda tensor: self._groups(tensor)[1])
        return QuantisedMatrix(torch.from_numpy(values), torch.from_numpy(scales))

    def _groups(self, tensor: StoredTensor) -> tuple[np.ndarray, np.ndarray]:
        groups = self._bytes(tensor).reshape(tensor.shape[0], tensor.shape[1] // 32, -1)
        scales = groups[..., :2].copy().view(np.float16)[..., 0]
        if BLOCKS[tensor.type_name] == 8:
            return groups[..., 2:].copy().view(np.int8).reshape(tensor.shape), scales
        nibbles = np.concatenate([groups[..., 2:] & 15, groups[..., 2:] >> 4], axis=-1)
        return (nibbles.astype(np.int8) - 8).reshape(tensor.shape), scales

    def _dequantised(self, tensor: StoredTensor) -> np.ndarray:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        kind = GGMLQuantizationType[tensor.type_name]
        if tensor.type_name in PLAIN and tensor.type_name != "BF16":
            stored = self._bytes(tensor).view(np.float32 if kind == 0 else np.float16)
            return stored.astype(np.float32).reshape(tensor.shape)
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        row_bytes = tensor.shape[-1] // per_block * block_bytes
        with np.errstate(all="ignore"):  # scales that are no numbers are refused by a test pass
            rows = dequantize(self._bytes(tensor).reshape(*tensor.shape[:-1], row_bytes), kind)
        return np.asarray(rows, dtype=np.float32).reshape(tensor.shape)

    def _bytes(self, tensor: StoredTensor) -> np.ndarray:
        return np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.start)

    def _in_order(
        self, tensor: StoredTensor, read: Callable[[StoredTensor], np.ndarray]
    ) -> np.ndarray:
        """Return rows in the order of transformers, which rotates the halves of a head.

        Llama files have the rows of queries and keys in pairs that are rotated together.
        """
        rows, architecture = read(tensor), self.metadata["general.architecture"]
        kind = tensor.name.split(".")[-2]
        if architecture != "llama" or kind not in ("attn_q", "attn_k"):
            return np.ascontiguousarray(rows)
        num_heads = self.metadata.get(f"{architecture}.attention.head_count")
        if kind == "attn_k":
            num_heads = self.metadata.get(f"{architecture}.attention.head_count_kv", num_heads)
        if type(num_heads) is not int or num_heads < 1 or len(rows) % (2 * num_heads):
            raise InvalidModel(f"{self.path} has {num_heads!r:.40} heads of {len(rows)} rows")
        pairs = rows.reshape(num_heads, len(rows) // num_heads // 2, 2, *rows.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))

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


def _splits_of_transformers() -> dict[str, Any]:
    # Importing this takes seconds.
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return {"names": sorted(GGUF_PRE_TOKENIZER_SPLITS)}


def _num_bytes(header: _Header, name: str, shape: tuple[int, ...], type_name: str) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    if 0 in shape or shape[-1] % per_block:
        raise header.error(f"{name:.60} of type {type_name} has the shape {list(shape)}")
    return math.prod(shape) // per_block * block_bytes


@lru_cache(maxsize=4)
def _opened(path: Path, modified_ns: int, size_bytes: int) -> GGUFFile:
    return GGUFFile(path)


def open_gguf(path: Path) -> GGUFFile:
    """Return a checked GGUF file; one that has not changed is checked once."""
    if find_spec("gguf") is None:
        raise InvalidModel(f"{path} needs the package gguf: pip install 'forerun[gguf]'")
    try:
        found = path.stat()
    except OSError as error:
        raise InvalidModel(f"{path} cannot be read: {error}") from error
    return _opened(path, found.st_mtime_ns, found.st_size)
