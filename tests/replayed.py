"""A server that sends given pieces, one in every second of a clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import httpcore
import pytest

from forerun import bounded_read


class Replayed(httpcore.NetworkStream):
    """A connection whose reads return pieces that `start` gives anew for each connection."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, start: Callable[[], Iterable[bytes]]
    ) -> None:
        self.start = start
        self.num_connections = 0
        self.now_s = 0.0
        self.timeouts: list[float | None] = []
        monkeypatch.setattr(httpcore.SyncBackend, "connect_tcp", self.connect)
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(bounded_read, "time", clock)

    def connect(self, *_: Any, **__: Any) -> Replayed:
        self.num_connections += 1
        self.pieces = iter(self.start())
        return self

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        self.timeouts.append(timeout)
        self.now_s += 1.0
        return next(self.pieces)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        pass

    def close(self) -> None:
        pass

    def get_extra_info(self, info: str) -> Any:
        return None
