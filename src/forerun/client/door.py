"""The one door to the network: requests within limits of time and bytes, without redirects.

No other package imports httpx. What it raises becomes an error of forerun here, in whose text every
URL is as `shown_url` renders it.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpcore
import httpx

from forerun.bounded_read import Deadline, ReadLimits
from forerun.client.urls import HIDDEN, hide_urls, shown_url
from forerun.errors import ForerunError, InvalidRequest, ServerUnavailable, UnreadableInput
from forerun.terminal_text import printable

Transport = httpx.BaseTransport
"""What carries requests in place of the network, in tests."""
_QUOTING = (httpx.InvalidURL, httpx.LocalProtocolError, httpx.UnsupportedProtocol)
"""Errors whose texts quote parts of the request, which may be secret."""
_CONNECT_S = 10.0
API_KEY = "OPENAI_API_KEY"
UNAUTHORIZED = (401, 403)
KEY_HINT = f" (the key sent is that of {API_KEY}, or of the variable that --api-key-env names)"

# Below this level they log the whole URL of every request.
for _name in ("httpx", "httpcore", "httpx2", "httpcore2"):
    logging.getLogger(_name).setLevel(logging.WARNING)


def reason_of(error: Exception) -> str:
    """Return what an error of the network says, without parts of URLs and headers."""
    if isinstance(error, _QUOTING):
        return "no request can be sent to such an address"
    reason = printable(hide_urls(error), max_length=300) or type(error).__name__
    return f"{reason}; is it running?" if "refused" in reason else reason


def authorization(variable: str | None) -> dict[str, str]:
    """Return the header with the API key of an environment variable; None is OPENAI_API_KEY.

    Raises InvalidRequest where the named variable is not set, or its value cannot be sent.
    """
    key = os.environ.get(variable or API_KEY, "").strip()
    if variable is not None and not key:
        raise InvalidRequest(f"the environment variable {variable!r}, for a key, is not set")
    if not (key.isascii() and key.isprintable()):
        raise InvalidRequest(f"{variable or API_KEY} is no API key: it has special characters")
    return {"Authorization": f"Bearer {key}"} if key else {}


class Unreachable(ServerUnavailable):
    """A server cannot be reached, or breaks off its answer; a retry may help."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} cannot be reached: {reason}")
        self.reason = reason


@contextmanager
def _translate_errors(name: str) -> Iterator[None]:
    """Turn the errors of httpx in the block into those of forerun."""
    try:
        yield
    except ForerunError:
        raise
    except _QUOTING as error:
        raise InvalidRequest(
            f"{name} cannot be reached: {reason_of(error)}; give one such as http://HOST:PORT/v1"
        ) from None
    except (httpx.HTTPError, OSError, OverflowError, ValueError) as error:
        raise Unreachable(name, reason_of(error)) from None


def answer_deadline(max_seconds: float, url: str) -> Deadline:
    """Return a time limit, from now on, on one answer of a server."""
    return Deadline(max_seconds, shown_url(url), "to answer")


class _ReadClock(threading.local):
    """The time limit of what the current thread reads from a server.

    The timeouts of httpx hold for one read each: a server that sends a byte of its headers now and
    then would be read without end.
    """

    deadline: Deadline | None = None
    has_read = False

    @contextmanager
    def until(self, deadline: Deadline, *, has_read: bool = False) -> Iterator[None]:
        """Enforce a time limit on all reads of this thread in the block, also of headers."""
        self.deadline, self.has_read = deadline, has_read
        try:
            yield
        finally:
            self.deadline = None


class _TimedStream(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream, clock: _ReadClock) -> None:
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
        self._clock.has_read = self._clock.has_read or bool(found)
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
    def __init__(self, backend: httpcore.NetworkBackend, clock: _ReadClock) -> None:
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


class Reply:
    """A response whose body is read in pieces within limits.

    Attributes:
        name: of the server, for messages.
    """

    def __init__(self, reply: httpx.Response, name: str, clock: _ReadClock) -> None:
        self.status = reply.status_code
        self.reason = printable(reply.reason_phrase, max_length=100)
        self.headers: Mapping[str, str] = reply.headers
        self.name = name
        self._reply = reply
        self._clock = clock
        self._pieces = self._read()
        self._has_read = False

    def close(self) -> None:
        self._reply.close()

    def piece(self, deadline: Deadline) -> bytes | None:
        """Return the next piece of the body; None at its end."""
        with self._clock.until(deadline, has_read=self._has_read), _translate_errors(self.name):
            piece = next(self._pieces, None)
        self._has_read = True
        return piece

    def body(self, deadline: Deadline, max_bytes: int) -> bytes:
        """Read the body to its end, and close the response; raises UnreadableInput at a limit."""
        body = bytearray()
        try:
            while (piece := self.piece(deadline)) is not None:
                deadline.remaining_s()
                body += piece
                check_size(len(body), max_bytes, self.name)
        finally:
            self.close()
        return bytes(body)

    def _read(self) -> Iterator[bytes]:
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":  # another one was not asked for
            raise UnreadableInput(f"{self.name} sends a body of encoding {printable(encoding)!r}")
        assert isinstance(self._reply.stream, httpx.SyncByteStream)
        yield from self._reply.stream


def check_size(num_bytes: int, max_bytes: int, name: str) -> None:
    """Raise UnreadableInput where more than `max_bytes` were sent."""
    if num_bytes > max_bytes:
        raise UnreadableInput(f"{name} sends more than {max_bytes} bytes, the limit here")


class Door:
    """Sends requests; several threads may use it at once. Redirects are not followed.

    Args:
        timeout_s: most seconds until the next byte arrives.
        headers: of every request, such as those of `authorization`.
        uses_environment: whether proxies that the environment names are used.
        transport: carries the requests, in tests.
    """

    def __init__(
        self,
        timeout_s: float,
        headers: Mapping[str, str],
        *,
        max_connections: int = 1,
        uses_environment: bool = True,
        transport: Transport | None = None,
    ) -> None:
        self._secrets = [value.partition(" ")[2] or value for value in headers.values() if value]
        self._clock = _ReadClock()
        self._http = httpx.Client(
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S)),
            headers={"Accept-Encoding": "identity", **headers},
            limits=httpx.Limits(max_connections=max_connections),
            trust_env=uses_environment,
            verify=True if uses_environment else ssl.create_default_context(),
            transport=transport,
        )
        # httpx has no public way to pass a network backend that keeps the proxies in use.
        for used in (self._http._transport, *self._http._mounts.values()):
            if isinstance(used, httpx.HTTPTransport):
                pool = used._pool
                pool._network_backend = _TimedBackend(pool._network_backend, self._clock)

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def send(self, method: str, url: str, deadline: Deadline, body: object = None) -> Reply:
        """Send a request, whose body is JSON, and return the response before its body is read.

        Raises:
            InvalidRequest: a request cannot be sent to such an address.
            Unreachable: the server does not answer.
            UnreadableInput: its answer takes longer than the time limit.
        """
        name = shown_url(url)
        with self._clock.until(deadline), _translate_errors(name):
            request = self._http.build_request(method, url, json=body)
            if (password := request.url.password) and password not in self._secrets:
                packed = b64encode(request.url.userinfo).decode()  # in the header of httpx
                self._secrets += [password, packed]
            return Reply(self._http.send(request, stream=True), name, self._clock)

    def hide_key(self, text: str) -> str:
        """Return words of a server without keys, passwords and URLs, which it may repeat."""
        text = hide_urls(text)
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text


def _send_accepted(
    door: Door, url: str, deadline: Deadline, body: object = None, key_hint: str = ""
) -> Reply:
    """Post a body, or get a page without one; return the response if its status is 200 to 299."""
    reply = door.send("GET" if body is None else "POST", url, deadline, body)
    if 200 <= reply.status < 300:
        return reply
    reply.close()
    if 300 <= reply.status < 400:
        where = shown_url(reply.headers.get("location", "elsewhere"))
        raise UnreadableInput(
            f"{reply.name} redirects to {where}, which is not followed: give that address"
        )
    problem = f"{reply.name} answers {reply.status}: {door.hide_key(reply.reason)}"
    raise UnreadableInput(problem + (key_hint if reply.status in UNAUTHORIZED else ""))


def fetch_page(url: str, limits: ReadLimits, headers: Mapping[str, str] | None = None) -> bytes:
    """Return the body of a page, requested once without proxies.

    Raises UnreadableInput or InvalidRequest where it cannot be read within the limits.
    """
    deadline = answer_deadline(limits.max_seconds, url)
    try:
        with Door(limits.max_seconds, headers or {}, uses_environment=False) as door:
            page = _send_accepted(door, url, deadline, key_hint=KEY_HINT)
            return page.body(deadline, limits.max_bytes)
    except Unreachable as error:
        raise UnreadableInput(f"{shown_url(url)} cannot be read: {error.reason}") from error


def post_once(
    url: str, content: object, max_seconds: float, headers: Mapping[str, str] | None = None
) -> None:
    """Post JSON and return once it was accepted; the body of the answer is not read.

    Raises UnreadableInput, InvalidRequest or ServerUnavailable where it was not.
    """
    with Door(max_seconds, headers or {}) as door:
        _send_accepted(door, url, answer_deadline(max_seconds, url), content).close()
