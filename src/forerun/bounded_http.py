"""HTTP requests whose responses are read within limits on bytes and total time."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from io import BufferedReader, RawIOBase
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from forerun.bounded_read import Deadline, ReadLimits, gunzipped
from forerun.errors import UnreadableInput

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = ["HttpAnswer", "http_request"]

CHUNK_BYTES = 1 << 16
HEADER_BYTES = 1 << 20
"""Status lines, headers and trailers of one exchange, beside the body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """An HTTP response: status, headers and body.

    Attributes:
        status: code, such as 200.
        reason: text of the status line.
        headers: by lower-case name; of a name that occurs twice the last value.
        body: decompressed.
    """

    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes


class LimitedSocket(RawIOBase):
    """Reads a socket within one deadline for the whole response, headers and trailers included.

    http.client waits anew for every read, so a server that sends one byte a second never ends.
    """

    def __init__(self, connection: socket.socket, deadline: Deadline, max_bytes: int) -> None:
        self.connection = connection
        self.deadline = deadline
        self.max_bytes = max_bytes
        self.num_bytes = 0

    def readable(self) -> bool:
        """Return True, as `io.RawIOBase` requires of readable streams."""
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Read the bytes that have arrived into a buffer."""
        self.connection.settimeout(self.deadline.remaining_s())
        try:
            size = self.connection.recv_into(cast("bytearray", buffer))
        except TimeoutError:
            self.deadline.remaining_s()  # raises
            raise
        self.num_bytes += size
        if self.num_bytes > self.max_bytes:
            raise UnreadableInput(
                f"{self.deadline.name} sends more than {self.max_bytes} bytes, the limit here"
            )
        return size


class LimitedConnection:
    """The part of a socket's interface that http.client needs, over a socket that stays open."""

    def __init__(self, reader: LimitedSocket) -> None:
        self.reader = reader

    def makefile(self, _mode: str) -> BufferedReader:
        """Return the file that responses are read from."""
        return BufferedReader(self.reader, CHUNK_BYTES)

    def sendall(self, data: ReadableBuffer) -> None:
        """Send a request."""
        connection = self.reader.connection
        connection.settimeout(self.reader.deadline.remaining_s())
        connection.sendall(data)

    def close(self) -> None:
        """Do nothing: http.client closes its socket before the body of a response is read."""


def http_request(
    url: str,
    *,
    limits: ReadLimits,
    method: str = "GET",
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> HttpAnswer:
    """Send one request, without proxies or redirects, and return the response.

    Args:
        url: http or https.
        limits: bytes (as sent and as decompressed) and seconds, connecting included.
        method: of the request.
        body: of the request.
        headers: of the request.

    Raises:
        UnreadableInput: the address is malformed, nothing answers, or the answer is over a limit.
    """
    deadline = Deadline(limits.max_seconds, url)
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UnreadableInput(f"{url} cannot be read: it is not an http or https address")
        connection = connected(parts.scheme, parts.hostname, parts.port, deadline)
        opened: socket.socket = connection.sock
        try:
            connection.sock = LimitedConnection(
                LimitedSocket(opened, deadline, limits.max_bytes + HEADER_BYTES)
            )
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request(method, target, body, dict(headers or {}))
            with connection.getresponse() as answer:
                return answered(answer, url, limits, deadline)
        finally:
            opened.close()
    except UnreadableInput:
        raise
    except (HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UnreadableInput(f"{url} cannot be read: {reason}") from error


def connected(scheme: str, host: str, port: int | None, deadline: Deadline) -> HTTPConnection:
    """Open a connection."""
    left_s = deadline.remaining_s()
    if scheme == "https":
        context = ssl.create_default_context()
        connection: HTTPConnection = HTTPSConnection(host, port, timeout=left_s, context=context)
    else:
        connection = HTTPConnection(host, port, timeout=left_s)
    connection.connect()
    return connection


def answered(answer: HTTPResponse, url: str, limits: ReadLimits, deadline: Deadline) -> HttpAnswer:
    """Read the whole response."""
    pieces, num_bytes = [], 0
    while piece := answer.read(CHUNK_BYTES):
        deadline.remaining_s()
        num_bytes += len(piece)
        if num_bytes > limits.max_bytes:
            raise UnreadableInput(f"{url} sends more than {limits.max_bytes} bytes, the limit here")
        pieces.append(piece)
    body = b"".join(pieces)
    headers = {name.lower(): value for name, value in answer.getheaders()}
    if headers.get("content-encoding", "").lower() in ("gzip", "x-gzip", "deflate"):
        body = gunzipped(body, url, limits)
    return HttpAnswer(status=answer.status, reason=answer.reason, headers=headers, body=body)
