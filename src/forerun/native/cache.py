"""Where prepared things are kept between runs, and how they get there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["cache_folder", "write_whole"]


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """FORERUN_CACHE, or forerun in the user's cache folder."""
    if chosen := environment.get("FORERUN_CACHE"):
        return Path(chosen).expanduser()
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "forerun"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all, whoever is interrupted or writes it too.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as unfinished:
        unfinished.write(content)
    Path(unfinished.name).replace(path)
