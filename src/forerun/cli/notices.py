"""What the package has to say while it works, as lines on stderr.

Warnings, and what is being prepared: the user waits for it, and should know why and how long.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["notices_on_stderr"]

PREPARATION = "forerun.preparation"
"""Logger of what is prepared once, or once per start."""


class Notices(logging.Handler):
    """Prints records to wherever stderr is at that moment, so that a spinner can step aside."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line, marked as ours."""
        try:
            print(f"forerun: {self.format(record)}", file=sys.stderr, flush=True)
        except BrokenPipeError:  # nobody reads it
            return


@contextmanager
def notices_on_stderr() -> Iterator[None]:
    """Show them for a while."""
    package, preparation = logging.getLogger("forerun"), logging.getLogger(PREPARATION)
    handler, level = Notices(), preparation.level
    package.addHandler(handler)
    preparation.setLevel(logging.INFO)
    try:
        yield
    finally:
        package.removeHandler(handler)
        preparation.setLevel(level)
