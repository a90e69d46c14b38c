"""Reading of single parameters from safetensors files."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.atomic_write import atomic_write
from forerun.bounded_read import check_regular
from forerun.errors import InvalidModel, UnreadableInput
from forerun.models.checkpoint import Checkpoint, count_elements
from forerun.models.decoder import ReadTensor
from forerun.models.stored_tensors import read_header, read_stored

# Constants some checkpoints carry along, which every implementation computes itself.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)

HEAD = "lm_head.weight"
PREFIX = "model."
TEXT_NAMES = MappingProxyType(
    {r"^language_model\.(model\.|lm_head)": r"\1", r"^model\.language_model\.": PREFIX}
)
"""Patterns of the names of the text part in a model that reads images too, and its own names."""


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


def parameter_names(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of the stored parameters in the whole model."""
    return tuple(_full_name(name) for path in checkpoint.weight_files for name in read_header(path))


def tensor_reader(
    checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device
) -> ReadTensor:
    """Return a function that reads one parameter by name, converted and moved to a device.

    Without a dtype it is the stored one. The file is mapped only while it is read from, so what has
    been read does not stay in memory.
    """
    if (packed := checkpoint.packed) is not None:
        return lambda name: packed.read(name).to(device=device, dtype=dtype)
    files = {
        _full_name(name): (path, name)
        for path in checkpoint.weight_files
        for name in read_header(path)
    }

    return lambda name: read_stored(*files[name]).to(device=device, dtype=dtype)


MAX_HEADER_BYTES = 1 << 20
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
        count_elements(path, max_header_bytes=MAX_HEADER_BYTES)
        return load_file(path)
    except (SafetensorError, OSError, UnreadableInput) as error:
        raise InvalidModel(f"{path} cannot be read: {error}") from error


def check_parameters(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse files whose parameters are not exactly those of the model."""
    if checkpoint.packed is not None:
        found = dict(checkpoint.packed.shapes)
    else:
        found = {
            _full_name(name): shape
            for path in checkpoint.weight_files
            for name, (shape, _) in read_header(path).items()
            if not name.endswith(IGNORED_SUFFIXES)
        }
        found = {name: found[name] for name in text_only(found)}
    tied_head = {HEAD} if HEAD not in expected else set()
    misshapen = {n for n, shape in expected.items() if found.get(n, shape) != shape}
    problems = {
        "missing": expected.keys() - found.keys(),
        "unexpected": found.keys() - expected.keys() - tied_head - checkpoint.zero_biases,
        "mismatched": misshapen,
    }
    for problem, names in problems.items():
        if names:
            raise InvalidModel(
                f"the weights in {checkpoint.folder} do not fit its configuration: "
                f"{len(names)} {problem}, the first {min(names)}"
            )


NOT_TEXT = (
    *("visual.", "vision_tower.", "multi_modal_projector.", "embed_vision."),
    *("audio_tower.", "embed_audio."),
)
"""Prefixes of the names of tensors that process images and sound."""


def text_only(names: Iterable[str]) -> list[str]:
    """Return the names of tensors of the language model, without its multi-token prediction.

    Such a module is called `mtp`, or it is a further layer with a projection of its own.
    """
    given, projection = [*names], "eh_proj.weight"
    owners = [name.removesuffix(projection) for name in given if name.endswith(f".{projection}")]
    others = ("mtp.", "mtp_layers.", *NOT_TEXT)
    modules = (*others, *(PREFIX + name for name in others), *owners)
    return [name for name in given if not name.startswith(modules)]


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


def has_own_head(checkpoint: Checkpoint, dtype: torch.dtype) -> bool:
    """Whether the files contain a head that is stored separately from the embedding.

    transformers then takes it, even where the configuration says that the two are tied.
    """
    if checkpoint.packed is not None:
        return HEAD in checkpoint.packed.shapes
    if not any(HEAD in read_header(path) for path in checkpoint.weight_files):
        return False
    read = tensor_reader(checkpoint, dtype, torch.device("cpu"))
    return not torch.equal(read(HEAD), read("model.embed_tokens.weight"))


def _full_name(name: str) -> str:
    """The name of a parameter in the whole model, of which text may be a part."""
    for pattern, replacement in TEXT_NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name if name.startswith((PREFIX, HEAD)) else PREFIX + name
