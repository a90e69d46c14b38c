"""Runs the application until a signal; running requests then have limited time to finish."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import socket
import sys
from functools import cache
from types import FrameType

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from forerun.engine.thread import AsyncEngine
from forerun.errors import EngineStopped, InvalidRequest
from forerun.server.config import ServerConfig

BACKLOG = 128
"""Connections that the system may hand over at once."""
RESERVED_FILES = BACKLOG + 96
"""Open files that are not connections: models, pipes of child processes, the listening socket."""
REQUEST_TIMEOUT_S = 15.0
"""Until a new connection must have sent the head of a request."""


@cache
def max_connections() -> int:
    """Return how many connections the limit of open files allows; it is raised if it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return max(16, soft - RESERVED_FILES)


class ServedConnection(H11Protocol):
    """A connection that gives way to new ones while it has no request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        """Start to wait for a request; of too many connections the oldest idle one is closed."""
        super().connection_made(transport)
        self.idle_since_s = self.loop.time()
        self._waiting: asyncio.TimerHandle | None = None
        self._await_request()
        if len(self.connections) > max_connections():
            others = [each for each in self.connections if isinstance(each, ServedConnection)]
            idle = [each for each in others if each.is_idle and not each.transport.is_closing()]
            min(idle, key=lambda each: each.idle_since_s, default=self).transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request of the connection."""
        self._await_request(False)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Note since when the connection is idle."""
        self.idle_since_s = self.loop.time()
        super().on_response_complete()

    @property
    def is_idle(self) -> bool:
        # Before the first request it is None.
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]

    def data_received(self, data: bytes) -> None:
        """Read a part of a request, whose head must be complete in time."""
        super().data_received(data)
        self._await_request(self.is_idle)

    def _await_request(self, is_awaited: bool = True) -> None:
        """Start the time limit of the next request, unless it runs, or end it."""
        if self._waiting is not None and not is_awaited:
            self._waiting.cancel()
            self._waiting = None
        elif self._waiting is None and is_awaited:
            self._waiting = self.loop.call_later(REQUEST_TIMEOUT_S, self._give_up)

    def _give_up(self) -> None:
        if self.is_idle and not self.transport.is_closing():
            self.transport.close()


MAX_HEADER_BYTES = 32 << 10
KEEP_ALIVE_S = 15
SWITCH_S = 0.0005
"""Seconds that a thread may run Python while another waits. A step of the engine waits several
times; with Python's default of 5 ms each it would be slow while large bodies are checked."""
CHECK_S = 1
"""Seconds between checks that the engine has not failed."""


def open_socket(config: ServerConfig) -> socket.socket:
    """Return a listening socket at the configured address; raises InvalidRequest."""
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise InvalidRequest(
            f"cannot listen on {config.host} port {config.port}: {error.strerror or error}; choose "
            "another --port (0 takes a free one) or --host"
        ) from error


class DrainingServer(uvicorn.Server):
    """A server that is not ready from the signal on that ends it."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end."""
        if isinstance(app := self.config.app, FastAPI):
            app.state.is_draining = True
        super().handle_exit(sig, frame)


def serve(app: ASGIApp, listener: socket.socket, config: ServerConfig, engine: AsyncEngine) -> None:
    """Serve until SIGTERM or SIGINT; running requests may then go on for `drain_s` seconds.

    `listener`, from `open_socket`, is closed. When an error ends `engine`, the server ends too and
    EngineStopped is raised.
    """

    async def notice_failure() -> None:
        server.should_exit |= engine.failure is not None

    settings = uvicorn_config(app, config)
    settings.callback_notify = notice_failure
    settings.timeout_notify = CHECK_S
    server = DrainingServer(settings)
    sys.setswitchinterval(SWITCH_S)
    gc.freeze()  # what is loaded stays: a full collection would stop all threads for longer

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    # They hold until uvicorn sets its own, and it raises the signal once more when it has drained.
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if engine.failure is not None:
        raise EngineStopped(f"the engine ended by an error: {engine.failure}") from engine.failure


def uvicorn_config(app: ASGIApp, config: ServerConfig) -> uvicorn.Config:
    """Return the settings of uvicorn: bounded headers, no log of requests, no other protocols."""
    return uvicorn.Config(
        app,
        http=ServedConnection,
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        ws="none",
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, int(config.drain_s)),
    )
