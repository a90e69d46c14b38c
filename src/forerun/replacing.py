"""Files and folders that are there whole or not at all, whoever is interrupted."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

__all__ = ["UNFINISHED", "replacing"]

UNFINISHED = ".tmp"
"""Suffix of what is not whole yet, or never will be."""


@contextmanager
def replacing(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """A place beside `path` to write a file or a folder to, which then takes its place.

    Until then an earlier one stays. What was begun and not finished is removed: half a file would
    only fill the disk that was full.

    Args:
        path: of the file or the folder; the folder it is in is made if need be.
        shared: several processes may write this file at once. Each then has a scratch of its own,
            which one that is killed leaves behind; otherwise the next writer removes it.

    Raises:
        OSError: it cannot be written; the error names `path`, also where the disk is full.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        yield path  # a device or a pipe, such as /dev/stdout: nothing may take its place
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    own = f".{uuid4().hex}" if shared else ""
    scratch = path.with_name(f"{path.name}{own}{UNFINISHED}")
    removed(scratch)
    try:
        yield scratch
        if path.is_dir():
            shutil.rmtree(path)
        scratch.replace(path)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # a full disk names no file
            error.filename = str(path)
        raise
    finally:
        removed(scratch)


def removed(path: Path) -> None:
    """Remove whatever is there, if anything is."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
