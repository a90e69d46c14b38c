"""Reading of headers and single tensors of a safetensors file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.errors import InvalidModel


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise InvalidModel(f"{path} cannot be read: {error}") from error


def read_stored(path: Path, name: str) -> Tensor:
    """Read one tensor by the name that it has in a file."""
    with _opened(path) as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def read_header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape and the type of every tensor in a file."""
    with _opened(path) as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no iterator)
        return {name: (tuple(p.get_shape()), p.get_dtype()) for name, p in parts.items()}
