"""Safetensors files: checks of their headers and tensors, reading and writing."""

from __future__ import annotations

import errno
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.atomic_write import atomic_write
from forerun.bounded_read import ReadLimits, check_regular, parse_json
from forerun.errors import InvalidModel, UnreadableInput
from forerun.models.decoder import StoredWeights

ITEM_BYTES: Mapping[str, int] = MappingProxyType({"F64": 8, "F32": 4, "F16": 2, "BF16": 2})
"""Element types that are supported, in safetensors' spelling."""
MAX_HEADER_BYTES = 32 << 20
"""Most bytes of a safetensors header; those of the largest published models have a few MB."""
MAX_TENSORS = 1 << 16
"""Most tensors of one safetensors file; those of the largest published models have some thousand.
More would take longer to describe than a user waits."""
HEADER_LIMITS = ReadLimits(max_bytes=MAX_HEADER_BYTES, max_values=4_000_000)
# Constants some checkpoints carry along, which every implementation computes itself.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)

PREFIX = "model."
TEXT_NAMES = MappingProxyType(
    {r"^language_model\.(model\.|lm_head)": r"\1", r"^model\.language_model\.": PREFIX}
)
"""Patterns of the names of the text part in a model that reads images too, and its own names."""


class FloatWeights(StoredWeights):
    """Tensors of safetensors files in floating point; a file is mapped only while it is read."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self.files = files

    @cached_property
    def type_counts(self) -> Counter[str]:
        return sum(map(count_elements, self.files), Counter())

    @cached_property
    def names(self) -> Mapping[str, tuple[Path, str, tuple[int, ...]]]:
        """File, name there and shape of every tensor."""
        return {
            _expand_name(name): (path, name, shape)
            for path in self.files
            for name, (shape, _) in read_header(path).items()
        }

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the parameters of the language model."""
        names = keep_text(n for n in self.names if not n.endswith(IGNORED_SUFFIXES))
        return {name: self.names[name][2] for name in names}

    def read(self, name: str) -> Tensor:
        path, stored, _ = self.names[name]
        return read_stored(path, stored)


def read_stored(path: Path, name: str) -> Tensor:
    """Read one tensor by the name that it has in a file."""
    try:
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
    except SafetensorError as error:
        raise InvalidModel(f"{path} cannot be read: {error}") from error
    return tensor


def read_header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape and the type of every tensor in a file that has been checked."""
    header, _ = parse_header(path, path.stat().st_size)
    header.pop("__metadata__", None)
    return {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in header.items()}


NOT_TEXT = (
    *("visual.", "vision_tower.", "multi_modal_projector.", "embed_vision."),
    *("audio_tower.", "embed_audio."),
)
"""Prefixes of the names of tensors that process images and sound."""


def keep_text(names: Iterable[str]) -> list[str]:
    """Return the names of tensors of the language model, without its multi-token prediction.

    Such a module is called `mtp`, or it is a further layer with a projection of its own.
    """
    given, projection = [*names], "eh_proj.weight"
    owners = [name.removesuffix(projection) for name in given if name.endswith(f".{projection}")]
    others = ("mtp.", "mtp_layers.", *NOT_TEXT)
    modules = (*others, *(PREFIX + name for name in others), *owners)
    return [name for name in given if not name.startswith(modules)]


def _expand_name(name: str) -> str:
    """The name of a parameter in the whole model, of which text may be a part."""
    for pattern, replacement in TEXT_NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name if name.startswith((PREFIX, "lm_head.weight")) else PREFIX + name


_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _TensorEntry(msgspec.Struct):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=8)]
    data_offsets: tuple[_Size, _Size]


def count_elements(path: Path, *, max_header_bytes: int = MAX_HEADER_BYTES) -> Counter[str]:
    """Count the elements per data type in a safetensors file, from its header."""
    size_bytes = path.stat().st_size
    header, header_bytes = parse_header(path, size_bytes, max_header_bytes)
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise InvalidModel(
            f"{path} has {len(header)} tensors; at most {MAX_TENSORS} of one file are read"
        )
    elements: Counter[str] = Counter()
    ranges = []
    for name, entry in header.items():
        start, end, num_elements = _check_range(path, name, entry)
        elements[entry["dtype"]] += num_elements
        ranges.append((start, end, name))
    declared_bytes = header_bytes
    for start, end, name in sorted(ranges):
        if header_bytes + start != declared_bytes:
            raise malformed(path, f"tensor {name!r} overlaps another or leaves a gap before it")
        declared_bytes = header_bytes + end
    if size_bytes != declared_bytes:
        raise InvalidModel(
            f"{path} has {size_bytes} bytes, its header declares {declared_bytes}: "
            "the file is incomplete or damaged; fetch it again"
        )
    return elements


def _check_range(path: Path, name: str, entry: Any) -> tuple[int, int, int]:
    """First byte, byte after the last and number of elements of a tensor in a header."""
    try:
        tensor = msgspec.convert(entry, _TensorEntry)
    except msgspec.ValidationError as error:
        raise malformed(path, f"tensor {name!r} is {entry!r:.80} ({error})") from error
    (start, end), dtype, num_elements = tensor.data_offsets, tensor.dtype, math.prod(tensor.shape)
    expected = num_elements * ITEM_BYTES.get(dtype, 0)
    if end < start or (dtype in ITEM_BYTES and end - start != expected):
        raise malformed(path, f"tensor {name!r} has {end - start} bytes for {num_elements} {dtype}")
    return start, end, num_elements


def malformed(path: Path, reason: str) -> InvalidModel:
    """The error for a safetensors header that contradicts itself."""
    return InvalidModel(f"{path} has a malformed safetensors header: {reason}")


def parse_header(
    path: Path, size_bytes: int, max_bytes: int = MAX_HEADER_BYTES
) -> tuple[dict[str, Any], int]:
    """Header of a safetensors file and where its data begin: 8 bytes of length, then JSON."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size_bytes - 8:
                raise InvalidModel(
                    f"{path} has {size_bytes} bytes, its header alone declares {8 + length}: "
                    "the file is truncated or no safetensors file; fetch it again"
                )
            if length > max_bytes:
                raise malformed(path, f"it has {length} bytes; at most {max_bytes} are read")
            header = parse_json(file.read(length), "its header", HEADER_LIMITS)
    except (OSError, ValueError) as error:
        raise InvalidModel(f"{path} cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise malformed(path, "it is no JSON object")
    return header, 8 + length


@contextmanager
def writing_tensors() -> Iterator[None]:
    """Turn safetensors' own error for a failing disk into an OSError."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error)) from error


def write_files(
    folder: Path, settings: Mapping[str, object], name: str, tensors: Mapping[str, Tensor]
) -> None:
    """Write config.json and then the weights, into a folder that is created if it is missing."""
    with atomic_write(folder / "config.json") as scratch:
        scratch.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    plain = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    with atomic_write(folder / name) as scratch, writing_tensors():
        save_file(plain, scratch, metadata={"format": "pt"})


MAX_HEAD_HEADER_BYTES = 1 << 20
"""Most bytes of the header of a head's file, which has some twenty tensors."""
MAX_FILE_BYTES = 32 << 30


def read_tensors(path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> dict[str, Tensor]:
    """Read all tensors of a head's safetensors file, after a check of its header.

    Raises InvalidModel where it is missing, damaged, no regular file, or beyond a limit.
    """
    try:
        check_regular(path)
        size_bytes = path.stat().st_size
        if size_bytes > max_bytes:
            raise InvalidModel(f"{path} has {size_bytes} bytes; at most {max_bytes} are read")
        count_elements(path, max_header_bytes=MAX_HEAD_HEADER_BYTES)
        return load_file(path)
    except (SafetensorError, OSError, UnreadableInput) as error:
        raise InvalidModel(f"{path} cannot be read: {error}") from error


def check_tensors(
    expected: Mapping[str, Tensor], found: Mapping[str, Tensor], where: str, *, advice: str
) -> None:
    """Refuse tensors that are not exactly those of a draft's state dict.

    Args:
        where: folder or file that they were read from.
        advice: what the user can do.

    Raises:
        InvalidModel: naming the first one that is missing, unknown or misshapen.
    """
    for problem, names in (
        ("lacks", expected.keys() - found.keys()),
        (f"holds, beside the {len(expected)} expected,", found.keys() - expected.keys()),
    ):
        if names:
            raise InvalidModel(
                f"{where} {problem} {len(names)} tensors, the first {min(names)}: {advice}"
            )
    for name in sorted(expected):
        wanted, given = tuple(expected[name].shape), tuple(found[name].shape)
        if wanted != given:
            raise InvalidModel(
                f"{name} in {where} has the shape {given}; it must have {wanted}: {advice}"
            )
