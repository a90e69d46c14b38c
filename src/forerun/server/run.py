"""Runs the application until a signal; running requests then have limited time to finish."""

from __future__ import annotations

import gc
import signal
import socket
import sys
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from forerun.engine.thread import EngineThread
from forerun.errors import EngineStopped, InvalidRequest
from forerun.server.config import ServerConfig
from forerun.server.connections import BACKLOG, ServedConnection

MAX_HEADER_BYTES = 32 << 10
KEEP_ALIVE_S = 15
SWITCH_S = 0.0005
"""For which one thread may run Python while another waits: a step of the engine waits several
times, and Python's 5 ms for each while a large body is checked would add up."""
CHECK_S = 1
"""Between two looks at whether the engine is alive."""


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


def serve(
    app: ASGIApp, listener: socket.socket, config: ServerConfig, engine: EngineThread | None = None
) -> None:
    """Serve until SIGTERM or SIGINT; running requests may then go on for `drain_s` seconds.

    `listener`, from `open_socket`, is closed. When an error ends `engine`, the server ends too and
    EngineStopped is raised.
    """

    async def notice_failure() -> None:
        server.should_exit |= engine is not None and engine.failure is not None

    settings = uvicorn_config(app, config)
    settings.callback_notify = notice_failure
    settings.timeout_notify = CHECK_S
    server = uvicorn.Server(settings)
    sys.setswitchinterval(SWITCH_S)
    gc.freeze()  # what is loaded stays: a full collection would stop all threads for longer
    # uvicorn raises the signal once more when it has drained, for handlers that were there before.
    before = {number: signal.signal(number, ignore) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if engine is not None and engine.failure is not None:
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


def ignore(number: int, frame: FrameType | None) -> None:
    """Handle a signal by doing nothing."""
