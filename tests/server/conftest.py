"""A tiny pair behind a real HTTP server on a free port of this machine."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from tests import tiny

from forerun.engine.engine import Engine
from forerun.engine.thread import AsyncEngine
from forerun.server.app import create_app
from forerun.server.config import ServerConfig
from forerun.server.run import open_socket, uvicorn_config

MODEL = "tiny"
TIMEOUT_S = 300.0
NUM_SLOTS = 8


def tiny_engine(*, with_draft: bool = True, **changes: Any) -> Engine:
    target = tiny.adapted(tiny.network("llama"), num_slots=NUM_SLOTS)
    draft = tiny.drafting(tiny.adapted(tiny.network("llama", seed=1), num_slots=NUM_SLOTS))
    settings = {"max_batch": 4, "max_waiting": 12} | changes
    return tiny.engine_over(target, draft if with_draft else None, **settings)


class Held:
    """An observer that holds the engine after its first steps until `go_on` is set."""

    is_required = False
    wants_logits = False

    def __init__(self, num_steps: int = 3) -> None:
        self.num_left = num_steps
        self.go_on = threading.Event()

    def observe(self, step: object) -> None:
        self.num_left -= 1
        if self.num_left < 0:
            assert self.go_on.wait(TIMEOUT_S)


def wait_until_idle(engine: Engine) -> None:
    """Wait until no request is left and every slot is free, which is shortly after."""
    ends_s = time.monotonic() + TIMEOUT_S
    while engine.has_unfinished or engine.target.store.num_free < NUM_SLOTS:
        assert time.monotonic() < ends_s
        time.sleep(0.01)


@contextlib.contextmanager
def serving(
    engine: Engine, config: ServerConfig | None = None, **parts: Any
) -> Iterator[httpx.Client]:
    """A client of a server on a thread; `base_url` says where it is."""
    config = config or ServerConfig(port=0)
    app = create_app(AsyncEngine(engine), MODEL, config, **parts)
    listener = open_socket(config)
    server = uvicorn.Server(uvicorn_config(app, config))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = "http://{}:{}".format(*listener.getsockname()[:2])
    try:
        with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
            client.app, client.server = app, server
            yield client
    finally:
        server.should_exit = True
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


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


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(tiny_engine()) as client:
        yield client
