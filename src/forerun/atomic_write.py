"""Atomic writes: files and folders are written under a temporary name and renamed at the end.

A reader therefore finds the old content or the new one, never a part of it, whichever process is
interrupted. The temporary name is unpredictable and created exclusively, so that no existing file
is overwritten and no symbolic link planted by another user is followed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = ".tmp"
"""Suffix of a temporary file or folder: it is being written, or its process was killed."""
MAX_STEM = 100
"""Characters of the final name that the temporary one repeats; names may have 255 bytes."""


@contextmanager
def atomic_write(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield an empty temporary file in the folder of `path`; it replaces `path` at the block's end.

    The mode of an existing file is kept. If the block raises, the temporary file is removed and an
    existing file stays as it was. A device or a pipe is written directly, since it cannot be
    replaced.

    Args:
        path: of the file; its folder is created if it does not exist. A symbolic link is followed.
        durable: whether to wait until the content is on the disk (fsync) before the rename.

    Raises:
        OSError: it cannot be written; the error names `path` even if the disk is full.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not (path.is_file() or path.is_dir()):
        yield path
        return
    with errors_naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = _create_file(path)
        try:
            yield scratch
            if durable:
                sync(scratch)
            scratch.replace(path)
            if durable:
                sync(path.parent)
        finally:
            remove(scratch)


@contextmanager
def atomic_folder(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield an empty temporary folder next to `path`, which it replaces when the block ends.

    Args:
        path: of the folder; an existing folder there is removed after the new one has its name.
        durable: as for `atomic_write`, for every file in the folder.

    Raises:
        OSError: it cannot be written; the error names `path` even if the disk is full.
    """
    path = Path(os.path.realpath(path))
    with errors_naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch, old = _create_folder(path), None
        try:
            yield scratch
            if durable:
                for parent, _, names in os.walk(scratch):
                    for name in names:
                        sync(Path(parent, name))
                    sync(Path(parent))
            if path.is_dir():
                scratch.chmod(stat.S_IMODE(path.stat().st_mode))
                old = _create_folder(path)
                path.replace(old)
            scratch.replace(path)
            if durable:
                sync(path.parent)
        finally:
            if old is not None and not path.exists():
                old.replace(path)  # the new folder could not be renamed: restore the old one
            elif old is not None:
                remove(old)
            remove(scratch)


def remove_unfinished(path: Path) -> None:
    """Remove temporary files and folders of writes to `path` by processes that were killed.

    Call it only where no other process can be writing `path`.
    """
    if not path.parent.is_dir():
        return
    pattern = re.compile(re.escape(path.name[:MAX_STEM]) + r"\.[0-9a-f]{16}" + UNFINISHED)
    for found in path.parent.iterdir():
        if pattern.fullmatch(found.name):
            remove(found)


@contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Add the file name `path` to an OSError without one, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def _create_file(path: Path) -> Path:
    """Create an empty temporary file for `path`, with the mode of an existing `path` if any."""
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    scratch = _make_name(path)
    # The umask applies to a new file; an existing mode is set exactly below.
    handle = os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode or 0o666)
    try:
        if mode is not None:
            os.fchmod(handle, mode)
    finally:
        os.close(handle)
    return scratch


def _create_folder(path: Path) -> Path:
    """Create an empty temporary folder for `path`."""
    scratch = _make_name(path)
    scratch.mkdir()
    return scratch


def _make_name(path: Path) -> Path:
    return path.with_name(f"{path.name[:MAX_STEM]}.{secrets.token_hex(8)}{UNFINISHED}")


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists; a symbolic link is removed, not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
