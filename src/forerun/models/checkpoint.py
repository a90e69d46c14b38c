"""A model folder, checked file by file before anything large is read."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import InvalidModel
from forerun.models.architecture import SUPPORTED

__all__ = ["Checkpoint", "read_checkpoint", "read_header", "read_object"]

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A folder whose files are all there and complete.

    Attributes:
        folder: where it is.
        architecture: class of the model in transformers.
        weight_files: safetensors files.
        num_parameters: elements over all tensors.
        stored_dtype: most common element type, in safetensors' spelling ("BF16").
    """

    folder: Path
    architecture: str
    weight_files: tuple[Path, ...]
    num_parameters: int
    stored_dtype: str


def read_checkpoint(folder: Path) -> Checkpoint:
    """Check a model folder; reads configuration and headers only.

    Raises:
        InvalidModel: a file is missing, unreadable or truncated, or the folder needs what is not
            supported: remote code, adapters, pickled or quantised weights.
    """
    if not folder.is_dir():
        raise InvalidModel(f"there is no model folder {folder}")
    if (folder / "adapter_config.json").exists():
        raise InvalidModel(f"{folder} holds an adapter (LoRA); merge it into its base model first")
    settings = read_object(folder / "config.json")
    architectures = settings.get("architectures")
    if not architectures:
        raise InvalidModel(f"{folder / 'config.json'} names no architecture (architectures)")
    refuse_own_code(folder, settings, str(architectures[0]))
    files = weight_files(folder)
    elements: Counter[str] = Counter()
    for file in files:
        elements += count_elements(file)
    if not elements or not elements.keys() <= FLOATS:
        found = ", ".join(sorted(elements)) or "nothing"
        raise InvalidModel(
            f"weights in {folder} are {found}; supported are {', '.join(sorted(FLOATS))}"
        )
    return Checkpoint(
        folder=folder,
        architecture=str(architectures[0]),
        weight_files=files,
        num_parameters=elements.total(),
        stored_dtype=elements.most_common(1)[0][0],
    )


def refuse_own_code(folder: Path, settings: dict[str, Any], architecture: str) -> None:
    """Models may bring code, which is never run.

    Some still name the code they came with before transformers had their class, Phi-3 for one;
    for a supported class of the same name transformers' own is used.
    """
    if "auto_map" not in settings:
        return
    code = settings["auto_map"] if isinstance(settings["auto_map"], dict) else {}
    own_class = str(code.get("AutoModelForCausalLM")).rpartition(".")[2]
    if own_class != architecture or architecture not in SUPPORTED:
        raise InvalidModel(f"{folder} needs code of its own (auto_map); remote code is never run")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        InvalidModel: the file is missing or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidModel(f"{path} is missing; is {path.parent} a model folder?") from None
    except (OSError, ValueError) as error:
        raise InvalidModel(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise InvalidModel(f"{path} holds no JSON object")
    return content


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a model, one or many.

    Raises:
        InvalidModel: there are none, or the index names one that is missing.
    """
    if (folder / INDEX).exists():
        names = sorted(set(read_object(folder / INDEX).get("weight_map", {}).values()))
    else:
        names = [WEIGHTS]
    missing = [name for name in names if not (folder / name).is_file()]
    if names and not missing:
        return tuple(folder / name for name in names)
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled:
        raise InvalidModel(
            f"{folder} has only pickled weights ({', '.join(pickled)}), which can run code when "
            "loaded; convert them to safetensors"
        )
    raise InvalidModel(f"{folder} lacks its weights: {', '.join(missing) or 'the index is empty'}")


def count_elements(path: Path) -> Counter[str]:
    """Elements per type in a safetensors file, read from its header.

    Raises:
        InvalidModel: the header cannot be read, or the file's size is not what it declares.
    """
    size_bytes = path.stat().st_size
    header, header_bytes = read_header(path, size_bytes)
    header.pop("__metadata__", None)
    try:
        ends = [entry["data_offsets"][1] for entry in header.values()]
        elements: Counter[str] = Counter()
        for entry in header.values():
            elements[entry["dtype"]] += math.prod(entry["shape"])
    except (KeyError, IndexError, TypeError) as error:
        raise InvalidModel(f"{path} has a malformed safetensors header: {error}") from error
    declared_bytes = header_bytes + max(ends, default=0)
    if size_bytes != declared_bytes:
        raise InvalidModel(
            f"{path} has {size_bytes} bytes, its header declares {declared_bytes}: "
            "the file is incomplete or damaged; fetch it again"
        )
    return elements


def read_header(path: Path, size_bytes: int) -> tuple[dict[str, Any], int]:
    """Header of a safetensors file and where its data begin: 8 bytes of length, then JSON."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size_bytes - 8:
                raise InvalidModel(
                    f"{path} has {size_bytes} bytes, its header alone declares {8 + length}: "
                    "the file is truncated or no safetensors file; fetch it again"
                )
            header = json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise InvalidModel(f"{path} cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise InvalidModel(f"{path} has a malformed safetensors header")
    return header, 8 + length
