"""Output files, checked before anything slow happens."""

from __future__ import annotations

from pathlib import Path

from forerun.errors import InvalidRequest

__all__ = ["PICTURES", "check_writable"]

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
