"""Checks of the tensors of a model or a draft, and writing of safetensors files."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.atomic_write import atomic_write
from forerun.bounded_read import check_regular
from forerun.errors import InvalidModel, UnreadableInput
from forerun.models.decoder import ReadTensor, StoredWeights
from forerun.models.stored_tensors import HEAD, count_elements


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


def tensor_reader(
    weights: StoredWeights, dtype: torch.dtype | None, device: torch.device
) -> ReadTensor:
    """Return a function that reads one parameter by name, converted and moved to a device.

    Without a dtype it is the stored one.
    """
    return lambda name: weights.read(name).to(device=device, dtype=dtype)


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


def check_parameters(
    weights: StoredWeights, expected: Mapping[str, tuple[int, ...]], folder: Path
) -> None:
    """Refuse files whose parameters are not exactly those of the model."""
    found = weights.shapes
    tied_head = {HEAD} if HEAD not in expected else set()
    misshapen = {n for n, shape in expected.items() if found.get(n, shape) != shape}
    problems = {
        "missing": expected.keys() - found.keys(),
        "unexpected": found.keys() - expected.keys() - tied_head - weights.zero_biases,
        "mismatched": misshapen,
    }
    for problem, names in problems.items():
        if names:
            raise InvalidModel(
                f"the weights in {folder} do not fit its configuration: "
                f"{len(names)} {problem}, the first {min(names)}"
            )


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


def has_own_head(weights: StoredWeights, dtype: torch.dtype) -> bool:
    """Whether the files contain a head that is stored separately from the embedding.

    transformers then takes it, even where the configuration says that the two are tied.
    """
    if weights.is_packed or HEAD not in weights.names:
        return HEAD in weights.names
    read = tensor_reader(weights, dtype, torch.device("cpu"))
    return not torch.equal(read(HEAD), read("model.embed_tokens.weight"))
