"""Output files, checked before anything slow happens."""

from __future__ import annotations

from pathlib import Path

from forerun.errors import InvalidRequest

__all__ = ["check_picture", "check_writable"]

PICTURES = (".pdf", ".png", ".svg")
"""Formats a plot can have."""


def check_writable(flag: str, path: Path) -> None:
    """Find out before anything slow happens; an existing file keeps its content.

    Raises:
        InvalidRequest: the file cannot be written.
    """
    existed = path.exists()
    try:
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise InvalidRequest(f"{flag} {path} cannot be written: {error.strerror}") from error


def check_picture(flag: str, path: Path) -> None:
    """The same for a file that a plot goes into.

    Raises:
        InvalidRequest: the file is no picture or cannot be written.
    """
    if path.suffix not in PICTURES:
        raise InvalidRequest(f"{flag} {path} must end in {', '.join(PICTURES)}")
    check_writable(flag, path)
