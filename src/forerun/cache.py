"""Cache folder for files that are expensive to compute.

The name of a file says what it was made from and ends in the hash of its content. A file of another
version is therefore never found, and a damaged one is recognised and made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun.atomic_write import atomic_write
from forerun.terminal_text import shell_command

logger = logging.getLogger("forerun.cache")

PRIVATE = 0o700
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
HASH_LENGTH = 16
"""Hexadecimal digits of every hash here."""


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return FORERUN_CACHE, or the folder `forerun` in the user's cache folder."""
    if chosen := environment.get("FORERUN_CACHE"):
        return Path(os.path.expanduser(chosen))
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "forerun"


def prepare_folder(folder: Path) -> str | None:
    """Create a cache folder that only its user can write; return why another user could, or None.

    What is in a folder of the second kind must not be used: it may come from anyone.
    """
    with suppress(OSError):  # reported where something is to be kept
        for path in reversed([folder, *folder.parents]):  # parents=True would take their umask
            if not path.exists():
                path.mkdir(mode=PRIVATE, exist_ok=True)
    if not folder.exists():  # only its own user could create it here
        return None
    folder = folder.resolve()
    if reason := unsafe(folder):
        return reason
    return next(filter(None, (unsafe(above, is_above=True) for above in folder.parents)), None)


def unsafe(path: Path, *, is_above: bool = False) -> str | None:
    """Return why another user could replace a file or a folder's content; None if none could."""
    found = path.stat()
    if found.st_uid not in (os.getuid(), 0):
        return f"{path} belongs to another user (uid {found.st_uid})"
    if found.st_mode & WRITABLE_BY_OTHERS and not (is_above and found.st_mode & stat.S_ISVTX):
        repair = shell_command("chmod go-w {path}", path=path)
        mode = stat.S_IMODE(found.st_mode)
        return f"{path} can be written by other users (mode {mode:o}); to use it: {repair}"
    return None


def write_cached(
    folder: Path, stem: str, suffix: str, content: bytes, *, durable: bool = True
) -> Path:
    """Write a file atomically; several processes may write the same file.

    `stem`, the beginning of its name, says what the content was made from. Raises OSError where the
    folder cannot be written. `durable` is that of `atomic_write`: a file that a crash of the
    machine damages is made again.
    """
    path = folder / f"{stem}-{hash_of(content)}{suffix}"
    with atomic_write(path, durable=durable) as scratch:
        scratch.write_bytes(content)
        scratch.chmod(stat.S_IMODE(scratch.stat().st_mode) & ~WRITABLE_BY_OTHERS)
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
    """Return a JSON object from the cache; compute and write it if it is missing.

    Nothing is read from or written to a folder that other users can write.
    """
    if danger := prepare_folder(folder):
        logger.warning("%s is not taken from the cache: %s", stem, danger)
        return make()
    path = find_cached(folder, stem, ".json")
    if path is not None and unsafe(path) is None:
        with suppress(OSError, ValueError):
            known: dict[str, Any] = json.loads(path.read_bytes())
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
        return path.is_file() and path.stem.endswith(f"-{hash_of(path.read_bytes())}")
    except OSError:
        return False


def hash_of(content: bytes) -> str:
    """Return the first 16 hexadecimal digits of a SHA-256 hash."""
    return hashlib.sha256(content).hexdigest()[:HASH_LENGTH]
