"""Requests to one server over HTTP with retries, an API key and limits; nothing of an API in it.

What comes back is read within limits on bytes, lines and seconds, because a server may be broken or
hostile. Busy and failing servers are tried again; a refusal is final.
"""

from __future__ import annotations

import logging
import math
import os
import ssl
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Lock
from typing import Any, TypeVar

import httpcore
import httpx

from forerun.bounded_read import Deadline, parse_json
from forerun.errors import InvalidRequest, Range, ServerUnavailable, UnreadableInput, check_ranges
from forerun.terminal_text import printable

_CHAT = "/chat"
_COMPLETIONS = "/completions"
_RANGES = (
    Range("max_connections", 1, integer=True),
    Range("num_tries", 1, integer=True),
    Range("first_wait_s", 0),
    Range("max_wait_s", 0),
    Range("timeout_s", 0, above_low=True),
    Range("stream_s", 0, above_low=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Address of a server, and how requests to it are retried and limited.

    Attributes:
        url: with or without /v1, or the address of /completions or /chat/completions itself.
        model: its name on the server; None takes the first one that the server lists.
        key_variable: environment variable with the API key; None takes OPENAI_API_KEY if it is set.
        max_connections: connections at once.
        num_tries: of a request, before the server counts as unavailable.
        first_wait_s: seconds before the second try; doubled for every further one.
        max_wait_s: most seconds between two tries, also if the server asks for more.
        timeout_s: seconds for a whole answer, headers included, or for the next event of a stream.
        stream_s: seconds for a whole stream.
    """

    url: str
    model: str | None = None
    key_variable: str | None = None
    max_connections: int = 64
    num_tries: int = 7
    first_wait_s: float = 1.0
    max_wait_s: float = 60.0
    timeout_s: float = 600.0
    stream_s: float = 3600.0

    def __post_init__(self) -> None:
        check_ranges(self, *_RANGES)

    @property
    def base(self) -> str:
        """Address that the paths of the API are appended to."""
        url = self.url.rstrip("/")
        if url.endswith(_COMPLETIONS):
            return url.removesuffix(_COMPLETIONS).removesuffix(_CHAT)
        return url if url.endswith("/v1") else url + "/v1"

    @property
    def is_chat(self) -> bool:
        """Whether the address is that of /chat/completions."""
        return self.url.rstrip("/").endswith(_CHAT + _COMPLETIONS)


def answer_deadline(max_seconds: float, name: str) -> Deadline:
    """Return a time limit, from now on, on one answer of a server."""
    return Deadline(max_seconds, name, "to answer")


class ReadClock(threading.local):
    """Limits of what the current thread reads from a server, and how much it has read.

    The timeouts of httpx hold for one read each: a server that sends a byte of its headers now and
    then would be read without end.
    """

    deadline: Deadline | None = None
    max_bytes: float = math.inf
    num_bytes: int = 0

    @contextmanager
    def until(self, deadline: Deadline, max_bytes: float = math.inf) -> Iterator[None]:
        """Enforce limits on all reads of this thread in the block, those of headers included."""
        before = self.deadline, self.max_bytes, self.num_bytes
        self.deadline, self.max_bytes, self.num_bytes = deadline, max_bytes, 0
        try:
            yield
        finally:
            self.deadline, self.max_bytes, self.num_bytes = before


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
            if deadline is not None and self._clock.num_bytes:
                deadline.remaining_s()  # slow rather than silent: a retry would be as slow
            raise
        self._clock.num_bytes += len(found)
        if self._clock.num_bytes > self._clock.max_bytes and deadline is not None:
            raise UnreadableInput(
                f"{deadline.name} sends more than {self._clock.max_bytes} bytes, the limit here"
            )
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


logger = logging.getLogger("forerun.client")

MAX_BODY_BYTES = 1 << 26
"""Most bytes of one decompressed answer; 30,000 tokens with 20 log-probabilities each take half."""
MAX_LINE_BYTES = 1 << 23
MAX_LINES = 1_000_000
"""Most lines of one stream; an event takes two."""
ID_FLAGS: tuple[Mapping[str, object], ...] = (
    {"return_token_ids": True, "return_tokens_as_token_ids": True},
    {"return_token_ids": True},
    {},
)
"""Flags that ask vLLM and forerun for token ids; a strict server refuses those it does not know."""
_API_KEY = "OPENAI_API_KEY"
_REFUSED = (400, 422)
_UNAUTHORIZED = (401, 403)
_BUSY = (408, 409, 425, 429)
_CONNECT_S = 10.0
_ENCODINGS = ("identity", "gzip", "deflate")

Result = TypeVar("Result")


class BrokenReply(Exception):
    """Raised if a server's response violates the protocol; a retry may help."""


class _BusyReply(BrokenReply):
    def __init__(self, message: str, retry_after: str | None) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def wait_s(self, otherwise: float) -> float:
        """Return the seconds in the Retry-After header if it is a number, else `otherwise`."""
        try:
            asked_s = float(otherwise if self.retry_after is None else self.retry_after)
        except ValueError:  # a date
            return otherwise
        return asked_s if asked_s >= 0.0 else otherwise


class Connection:
    """Requests to one server; several threads may use it at once.

    Attributes:
        waits_s: seconds waited before every further try of a request.
        num_posted: requests posted, further tries and refused ones included.

    Raises:
        InvalidRequest: the variable of the key is not set, or its value cannot be sent.
    """

    def __init__(self, config: ClientConfig, transport: httpx.BaseTransport | None = None) -> None:
        self.config = config
        self.closing = Event()
        self.waits_s: list[float] = []
        self.num_posted = 0
        self._counting = Lock()
        self._refused_flags: dict[str, int] = {}
        self._clock = ReadClock()
        self._http = httpx.Client(
            timeout=httpx.Timeout(config.timeout_s, connect=min(config.timeout_s, _CONNECT_S)),
            headers={"Accept-Encoding": "gzip", **_authorization(config.key_variable)},
            limits=httpx.Limits(max_connections=config.max_connections),
            transport=transport,
        )
        limit_reads(self._http, self._clock)

    def close(self) -> None:
        self.closing.set()
        self._http.close()

    def get(self, url: str, timeout_s: float) -> bytes:
        """Return the body at an address after one try; raises as `post`."""
        deadline = answer_deadline(timeout_s, url)
        try:
            reply = self._send(self._http.build_request("GET", url, timeout=timeout_s), deadline)
            _check_status(reply)
            return self._body_of(reply, deadline)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            problem = printable(error) or type(error).__name__
            raise ServerUnavailable(f"{url} cannot be reached: {problem}") from error
        except (BrokenReply, UnreadableInput) as error:
            raise ServerUnavailable(f"{url} gives no answer; {printable(error)}") from error

    def post(self, url: str, body: Mapping[str, object], read: Callable[[Any], Result]) -> Result:
        """Post a request and return the result of `read` on the JSON of the response.

        The request is posted again where `read` raises BrokenReply.

        Raises:
            InvalidRequest: the server refuses the request.
            ServerUnavailable: no answer came after as many tries as were allowed.
        """

        def attempt() -> Result:
            deadline = answer_deadline(self.config.timeout_s, url)
            reply = self._opened(url, body, deadline)
            return read(_parsed(self._body_of(reply, deadline)))

        return self._tried(url, attempt)

    def events(self, url: str, body: Mapping[str, object]) -> Generator[dict[str, Any], None, None]:
        """Post a request and yield the JSON objects of the server-sent events in response.

        Only the beginning is tried again: a stream that breaks off is an error. Raises as `post`.
        """

        def attempt() -> httpx.Response:
            return self._opened(url, body, answer_deadline(self.config.timeout_s, url))

        reply = self._tried(url, attempt)
        try:
            for data in self._event_data(reply, url):
                yield _event(data, url)
        except httpx.TransportError as error:
            problem = printable(error) or type(error).__name__
            raise ServerUnavailable(f"{url} broke off its answer: {problem}") from error
        except UnreadableInput as error:
            raise ServerUnavailable(printable(error)) from error
        finally:
            reply.close()

    def _tried(self, url: str, attempt: Callable[[], Result]) -> Result:
        problem, config = "", self.config
        for index in range(config.num_tries):
            wait_s = min(config.first_wait_s * 2.0**index, config.max_wait_s)
            try:
                return attempt()
            except UnreadableInput as error:  # it would be as large the next time
                raise ServerUnavailable(printable(error)) from error
            except _BusyReply as error:
                problem = printable(error)
                wait_s = min(error.wait_s(wait_s), config.max_wait_s)
            except (httpx.TransportError, BrokenReply) as error:
                problem = printable(error) or type(error).__name__
            if index + 1 < config.num_tries:
                logger.info("%s: %s; again in %.0f s", url, problem, wait_s)
                self.waits_s.append(wait_s)
                if self.closing.wait(wait_s):
                    break
        raise ServerUnavailable(f"{url} gave no response in {config.num_tries} tries: {problem}")

    def _opened(self, url: str, body: Mapping[str, object], deadline: Deadline) -> httpx.Response:
        """Post a request and return the successful response before its body is read."""
        for num_refused in range(self._refused_flags.get(url, 0), len(ID_FLAGS)):
            fields = {**body, **ID_FLAGS[num_refused]}
            with self._counting:
                self.num_posted += 1
            reply = self._send(self._http.build_request("POST", url, json=fields), deadline)
            if reply.status_code not in _REFUSED:
                self._refused_flags[url] = num_refused
            # A server that has taken these flags once refuses something else.
            if num_refused >= self._refused_flags.get(url, len(ID_FLAGS)):
                break
        _check_status(reply)
        return reply

    def _send(self, request: httpx.Request, deadline: Deadline) -> httpx.Response:
        """Send a request; the body of an error is read, that of a success is not."""
        with self._clock.until(deadline):
            reply = self._http.send(request, stream=True)
        try:
            # httpx would decompress any other encoding without a limit on its size.
            encoding = reply.headers.get("content-encoding", "identity").strip().lower()
            if encoding not in _ENCODINGS:
                raise UnreadableInput(f"{request.url} sends a body of encoding {encoding!r}")
            if not reply.is_success:
                reply.extensions["body"] = self._body_of(reply, deadline)
        except BaseException:
            reply.close()
            raise
        return reply

    def _body_of(self, reply: httpx.Response, deadline: Deadline) -> bytes:
        """Read a body to its end, and close the response."""
        body = bytearray()
        try:
            with self._clock.until(deadline):
                for chunk in reply.iter_bytes():
                    deadline.remaining_s()
                    body += chunk
                    _check_size(len(body), deadline.name)
        finally:
            reply.close()
        return bytes(body)

    def _event_data(self, reply: httpx.Response, url: str) -> Iterator[bytes]:
        """Yield what follows `data:` in every line of a stream until its end marker."""
        whole, next_event = (
            answer_deadline(seconds, url)
            for seconds in (self.config.stream_s, self.config.timeout_s)
        )
        num_bytes, num_lines, rest = 0, 0, bytearray()
        chunks = reply.iter_bytes()
        while True:
            sooner = min(whole, next_event, key=Deadline.remaining_s)
            with self._clock.until(sooner):
                chunk = next(chunks, None)
            if chunk is None:
                raise ServerUnavailable(f"{url} ended its answer before it was complete")
            num_bytes += len(chunk)
            *ended, last = chunk.split(b"\n")
            num_lines += len(ended)
            _check_size(num_bytes, url)
            if num_lines > MAX_LINES:
                raise UnreadableInput(f"{url} sends more than {MAX_LINES} lines, the limit")
            for line in ended:
                rest += line
                data = bytes(rest[5:]).strip() if rest.startswith(b"data:") else b""
                rest.clear()
                if data == b"[DONE]":
                    return
                if data:
                    yield data
                    next_event = answer_deadline(self.config.timeout_s, url)
            rest += last
            if len(rest) > MAX_LINE_BYTES:
                raise UnreadableInput(f"{url} sends a line over {MAX_LINE_BYTES} bytes, the limit")


def _authorization(variable: str | None) -> dict[str, str]:
    """Return the header with the API key of the environment."""
    key = os.environ.get(variable or _API_KEY, "")
    if variable is not None and not key:
        raise InvalidRequest(f"the environment variable {variable!r}, for a key, is not set")
    if not (key.isascii() and key.isprintable()):
        raise InvalidRequest(f"{variable or _API_KEY} is no API key: it has special characters")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _check_size(num_bytes: int, name: str) -> None:
    if num_bytes > MAX_BODY_BYTES:
        raise UnreadableInput(f"{name} sends more than {MAX_BODY_BYTES} bytes, the limit")


def _start_of(body: bytes) -> str:
    return printable(body[:600].decode(errors="replace"), max_length=300)


def _check_status(reply: httpx.Response) -> None:
    """Raise an error unless a response has status 200 to 299."""
    if reply.is_success:
        return
    problem = f"status {reply.status_code}: {_start_of(reply.extensions['body'])}"
    if reply.status_code >= 500 or reply.status_code in _BUSY:
        raise _BusyReply(problem, reply.headers.get("retry-after"))
    if reply.status_code in _UNAUTHORIZED:
        problem += f" (the key sent is that of {_API_KEY}, unless another variable is named)"
    raise InvalidRequest(f"{reply.url} refuses the request with {problem}")


def _parsed(body: bytes) -> Any:
    try:
        return parse_json(body, "the answer")
    except UnreadableInput as error:
        raise BrokenReply(f"{error}; it begins with {_start_of(body)}") from error


def _event(data: bytes, url: str) -> dict[str, Any]:
    """Parse the JSON object of one server-sent event."""
    event = parse_json(data, f"an event of {url}")
    if not isinstance(event, dict) or "error" in event:
        raise ServerUnavailable(f"{url} sends {printable(str(event), max_length=300)}")
    return event
