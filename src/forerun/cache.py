"""Cache folder for files that are expensive to compute.

The name of a file says what it was made from and ends in the hash of its content. A file of another
version is therefore never found, and a damaged one is recognised and made again.
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
from forerun.bounded_documents import parse_json
from forerun.bounded_read import ReadLimits, read_bytes
from forerun.errors import UnreadableInput

logger = logging.getLogger("forerun.cache")

HASH_LENGTH = 16
"""Hexadecimal digits of every hash here."""
LIMITS = ReadLimits(max_bytes=1 << 34, max_seconds=600.0)
"""Of a cached file; the largest are shards of a teacher's outputs."""


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return FORERUN_CACHE, or the folder `forerun` in the user's cache folder."""
    if chosen := environment.get("FORERUN_CACHE"):
        return Path(chosen).expanduser()
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "forerun"


def write_cached(folder: Path, stem: str, suffix: str, content: bytes) -> Path:
    """Write a file atomically; several processes may write the same file.

    Args:
        folder: created if it does not exist.
        stem: beginning of the name, which says what the content was made from.
        suffix: end of the name, such as ".json".
        content: of the file.

    Raises:
        OSError: the folder cannot be written.
    """
    path = folder / f"{stem}-{hash_of(content)}{suffix}"
    with atomic_write(path) as scratch:
        scratch.write_bytes(content)
    return path


def find_cached(folder: Path, stem: str, suffix: str) -> Path | None:
    """Return the path of a cached file; None if it does not exist or is damaged."""
    for path in sorted(folder.glob(f"{stem}-*{suffix}")):
        if is_whole(path):
            return path
        logger.warning("%s is damaged and is made again", path)
        with suppress(OSError):
            path.unlink()
    return None


def cached_json(folder: Path, stem: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a JSON object from the cache; compute and write it if it is missing."""
    if path := find_cached(folder, stem, ".json"):
        with suppress(UnreadableInput):
            known: dict[str, Any] = parse_json(read_bytes(path), str(path))
            return known
    made = make()
    try:
        write_cached(folder, stem, ".json", json.dumps(made).encode())
    except OSError as error:  # only the time to make it again is lost
        logger.debug("%s is not written to the cache: %s", stem, error)
    return made


def is_whole(path: Path) -> bool:
    """Whether the content of a file matches the hash in its name; False if it is unreadable."""
    try:
        return path.stem.endswith(f"-{hash_of(read_bytes(path, LIMITS))}")
    except UnreadableInput:
        return False


def hash_of(content: bytes) -> str:
    """Return the first 16 hexadecimal digits of a SHA-256 hash."""
    return hashlib.sha256(content).hexdigest()[:HASH_LENGTH]
