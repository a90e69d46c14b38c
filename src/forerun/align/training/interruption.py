"""Ctrl-C and SIGTERM as a wish that is granted between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Interruption"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Notes the first signal; the second does what signals do.

    Only the main thread may handle signals: elsewhere nothing is noted.
    """

    def __init__(self) -> None:
        self.wished = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._before = {name: signal.signal(name, self._note) for name in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.wished = True
        self._restore()

    def _restore(self) -> None:
        while self._before:
            name, handler = self._before.popitem()
            signal.signal(name, handler)
