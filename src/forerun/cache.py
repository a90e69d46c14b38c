"""Where prepared things are kept between runs, and how they get there and back.

The name of a file says what it was made from and ends in the hash of what it holds. So nothing from
another version is ever found, and what was cut short or written over is known for it and not used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun.atomic_write import atomic_write

__all__ = [
    "HASH_LENGTH",
    "cache_folder",
    "find_kept",
    "hash_of",
    "is_whole",
    "keep",
    "worked_out_once",
]

logger = logging.getLogger("forerun.cache")

HASH_LENGTH = 16
"""Of every hash here, in hexadecimal digits."""


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """FORERUN_CACHE, or forerun in the user's cache folder."""
    if chosen := environment.get("FORERUN_CACHE"):
        return Path(chosen).expanduser()
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "forerun"


def keep(folder: Path, stem: str, suffix: str, content: bytes) -> Path:
    """Write a file that is there whole or not at all, whoever is interrupted or writes it too.

    Args:
        folder: made if need be.
        stem: of the name: what the content was made from.
        suffix: of the name, such as ".json".
        content: what to keep.

    Raises:
        OSError: the folder cannot be written.
    """
    path = folder / f"{stem}-{hash_of(content)}{suffix}"
    with atomic_write(path) as scratch:
        scratch.write_bytes(content)
    return path


def find_kept(folder: Path, stem: str, suffix: str) -> Path | None:
    """Where a file made from the same is kept; None if it is not, or is not what was kept."""
    for path in sorted(folder.glob(f"{stem}-*{suffix}")):
        if is_whole(path):
            return path
        logger.warning("%s is damaged and is made again", path)
        with suppress(OSError):
            path.unlink()
    return None


def worked_out_once(
    folder: Path, stem: str, work_out: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """A JSON object from the cache if it is there, worked out and kept otherwise.

    Args:
        folder: the cache.
        stem: of the name: what the object is made from.
        work_out: makes it.
    """
    if path := find_kept(folder, stem, ".json"):
        known: dict[str, Any] = json.loads(path.read_bytes())
        return known
    found = work_out()
    try:
        keep(folder, stem, ".json", json.dumps(found).encode())
    except OSError as error:  # nothing is lost but a second of every start
        logger.debug("%s is not kept: %s", stem, error)
    return found


def is_whole(path: Path) -> bool:
    """Whether a file holds what its name says; one that cannot be read is of no use either."""
    try:
        return path.stem.endswith(f"-{hash_of(path.read_bytes())}")
    except OSError:
        return False


def hash_of(content: bytes) -> str:
    """The first 16 hexadecimal digits of a SHA-256: what the name of a file ends in."""
    return hashlib.sha256(content).hexdigest()[:HASH_LENGTH]
