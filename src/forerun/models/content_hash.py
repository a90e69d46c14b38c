"""Short hashes of model files, by which traces identify models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from forerun.cache import HASH_LENGTH, hash_of
from forerun.errors import InvalidModel
from forerun.models.checkpoint import read_header

__all__ = ["template_hash", "tokenizer_hash", "weights_hash", "weights_sample_hash"]

SAMPLE_BYTES = 4096


def weights_hash(weight_files: Iterable[Path]) -> str:
    """Hash of the bytes of safetensors files, taken in the order of their names.

    Args:
        weight_files: as in `Checkpoint.weight_files`.

    Returns:
        The first 16 hexadecimal digits of a SHA-256.
    """
    return combined(sorted(weight_files))


def weights_sample_hash(weight_files: Iterable[Path]) -> str:
    """Hash of the headers and of 4 KiB from the middle of every tensor.

    For a warning at every start, where reading hundreds of gigabytes twice is too much. Training
    moves nearly all values of a tensor; a hand that changes a few may go unnoticed.

    Args:
        weight_files: as in `Checkpoint.weight_files`.

    Returns:
        The first 16 hexadecimal digits of a SHA-256.

    Raises:
        InvalidModel: a header cannot be read.
    """
    total = hashlib.sha256()
    for path in sorted(weight_files):
        header, data_starts = read_header(path, path.stat().st_size)
        header.pop("__metadata__", None)
        total.update(json.dumps(header, sort_keys=True).encode())
        with path.open("rb") as file:
            for name in sorted(header):
                start, end = header[name]["data_offsets"]
                length = min(SAMPLE_BYTES, end - start)
                file.seek(data_starts + start + (end - start - length) // 2)
                total.update(file.read(length))
    return total.hexdigest()[:HASH_LENGTH]


def tokenizer_hash(folder: Path) -> str:
    """Hash of the tokenizer in a model folder.

    Returns:
        The first 16 hexadecimal digits of a SHA-256.

    Raises:
        InvalidModel: the folder has no tokenizer.json.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InvalidModel(f"{path} is missing; is {folder} a model folder?")
    return combined([path])


def template_hash(folder: Path) -> str:
    """Hash of the chat template in a model folder, wherever it is written.

    Returns:
        The first 16 hexadecimal digits of a SHA-256, of nothing where there is no template.

    Raises:
        InvalidModel: the tokenizer's settings cannot be read.
    """
    parts = []
    files = [folder / "chat_template.jinja", folder / "chat_template.json"]
    for path in [*files, *sorted(folder.glob("additional_chat_templates/*.jinja"))]:
        if path.is_file():
            parts.append(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        try:
            template = json.loads(settings.read_text(encoding="utf-8")).get("chat_template")
        except (AttributeError, ValueError) as error:
            raise InvalidModel(f"{settings} cannot be read: {error}") from error
        parts.append(b"" if template is None else json.dumps(template, sort_keys=True).encode())
    return hash_of(b"".join(parts))


def combined(files: Iterable[Path]) -> str:
    """Hash the hashes of the files, so that file boundaries matter."""
    digests = []
    for path in files:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").digest())
    return hash_of(b"".join(digests))
