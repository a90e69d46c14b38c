"""A total time limit on each answer, enforced where httpx reads from the socket.

The timeouts of httpx hold for one read each: a server that sends a byte of its headers now and then
would be read without end.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpcore
import httpx

from forerun.errors import UnreadableInput


class AnswerDeadline:
    """A time limit on one answer."""

    def __init__(self, max_seconds: float, name: str) -> None:
        self.max_seconds = max_seconds
        self.name = name
        self._end_s = time.monotonic() + max_seconds

    def remaining_s(self) -> float:
        """Return the seconds that are left; raises UnreadableInput if none are."""
        left_s = self._end_s - time.monotonic()
        if left_s <= 0.0:
            raise UnreadableInput(f"{self.name} takes more than {self.max_seconds:g} s to answer")
        return left_s


class ReadClock(threading.local):
    """The deadline of what the current thread reads, and whether anything was read before it."""

    deadline: AnswerDeadline | None = None
    has_read: bool = False

    @contextmanager
    def until(self, deadline: AnswerDeadline) -> Iterator[None]:
        """Enforce a deadline on every read of this thread in the block."""
        before = self.deadline, self.has_read
        self.deadline, self.has_read = deadline, False
        try:
            yield
        finally:
            self.deadline, self.has_read = before


class _TimedStream(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream, clock: ReadClock) -> None:
        self._stream = stream
        self._clock = clock

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        deadline = self._clock.deadline
        if deadline is not None:
            left_s = deadline.remaining_s()
            timeout = left_s if timeout is None else min(timeout, left_s)
        try:
            found = self._stream.read(max_bytes, timeout)
        except httpcore.ReadTimeout:
            if deadline is not None and self._clock.has_read:
                deadline.remaining_s()  # slow rather than silent: a retry would be as slow
            raise
        self._clock.has_read = True
        return found

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, timeout)

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        stream = self._stream.start_tls(ssl_context, server_hostname, timeout)
        return _TimedStream(stream, self._clock)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _TimedBackend(httpcore.NetworkBackend):
    def __init__(self, backend: httpcore.NetworkBackend, clock: ReadClock) -> None:
        self._backend = backend
        self._clock = clock

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.NetworkStream:
        stream = self._backend.connect_tcp(host, port, timeout, local_address, socket_options)
        return _TimedStream(stream, self._clock)


def limit_reads(client: httpx.Client, clock: ReadClock) -> None:
    """Make every connection of a client obey the deadline of the thread that reads from it."""
    # httpx has no public way to pass a network backend that keeps the proxies of the environment.
    for transport in (client._transport, *client._mounts.values()):
        if isinstance(transport, httpx.HTTPTransport):
            pool = transport._pool
            pool._network_backend = _TimedBackend(pool._network_backend, clock)
