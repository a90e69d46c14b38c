"""Tests here start servers on this machine, and reach no other one."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Tests here may reach this machine and no other."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        connect = socket.socket.connect

        def refuse(self: socket.socket, address: object) -> None:
            if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1"):
                raise RuntimeError(f"tests reach this machine alone: connect to {address!r}")
            connect(self, address)

        monkeypatch.setattr(socket.socket, "connect", refuse)
        yield
