"""Requests to one server over HTTP with retries, an API key and limits; nothing of an API in it.

What comes back is read within limits on bytes, lines and seconds, because a server may be broken or
hostile. Busy and failing servers are tried again; a refusal is final.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from threading import Event, Lock
from typing import Any, TypeVar

from forerun.bounded_read import Deadline, parse_json
from forerun.client.door import (
    KEY_HINT,
    UNAUTHORIZED,
    Door,
    Reply,
    Transport,
    Unreachable,
    answer_deadline,
    authorization,
    check_size,
)
from forerun.client.urls import shown_url
from forerun.errors import InvalidRequest, Range, ServerUnavailable, UnreadableInput, check_ranges
from forerun.terminal_text import printable

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
        if url.endswith("/completions"):
            return url.removesuffix("/completions").removesuffix("/chat")
        return url if url.endswith("/v1") else url + "/v1"


logger = logging.getLogger("forerun.client")

MAX_BODY_BYTES = 1 << 26
"""Most bytes of one answer; 30,000 tokens with 20 log-probabilities each take half."""
MAX_LINE_BYTES = 1 << 23
MAX_WORD_BYTES = 4096
"""Of the beginning of an answer that a message quotes."""
MAX_ERROR_BYTES = 1 << 16
MAX_LINES = 1_000_000
"""Most lines of one stream; an event takes two."""
ID_FLAGS: tuple[Mapping[str, object], ...] = (
    {"return_token_ids": True, "return_tokens_as_token_ids": True},
    {"return_token_ids": True},
    {},
)
"""Flags that ask vLLM and forerun for token ids; a strict server refuses those it does not know."""
_REFUSED = (400, 422)
_BUSY = (408, 409, 425, 429)

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


def find_message(body: bytes) -> str | None:
    """Return the sentence in the JSON of an error; None if there is none."""
    try:
        found = parse_json(body[:MAX_ERROR_BYTES], "the answer")
    except UnreadableInput:
        return None
    for name in ("error", "message", "detail"):
        if isinstance(found, dict):
            found = found.get(name, found)
    return found if isinstance(found, str) else None


class Connection:
    """Requests to one server; several threads may use it at once.

    Attributes:
        waits_s: seconds waited before every further try of a request.
        num_posted: requests posted, further tries and refused ones included.

    Raises:
        InvalidRequest: the variable of the key is not set, or its value cannot be sent.
    """

    def __init__(self, config: ClientConfig, transport: Transport | None = None) -> None:
        self.config = config
        self.closing = Event()
        self.waits_s: list[float] = []
        self.num_posted = 0
        self._counting = Lock()
        self._refused_flags: dict[str, int] = {}
        self._door = Door(
            config.timeout_s,
            authorization(config.key_variable),
            max_connections=config.max_connections,
            transport=transport,
        )

    def close(self) -> None:
        self.closing.set()
        self._door.close()

    def hide_key(self, text: str) -> str:
        """Return a text without the API key, which a server may repeat in its answers."""
        return self._door.hide_key(text)

    def get(self, url: str, timeout_s: float) -> bytes:
        """Return the body at an address after one try; raises as `post`."""
        deadline = answer_deadline(timeout_s, url)
        try:
            reply = self._door.send("GET", url, deadline)
            self._check_status(reply, deadline)
            return reply.body(deadline, MAX_BODY_BYTES)
        except (BrokenReply, UnreadableInput) as error:
            raise ServerUnavailable(
                f"{shown_url(url)} gives no answer; {printable(error)}"
            ) from error

    def post(self, url: str, body: Mapping[str, object], read: Callable[[Any], Result]) -> Result:
        """Post a request and return the result of `read` on the JSON of the response.

        The request is posted again where `read` raises BrokenReply.

        Raises:
            InvalidRequest: the server refuses the request.
            ServerUnavailable: no answer came after as many tries as were allowed.
        """

        def attempt() -> Result:
            deadline = answer_deadline(self.config.timeout_s, url)
            reply = self._open_reply(url, body, deadline)
            return read(self._parse(reply.body(deadline, MAX_BODY_BYTES)))

        return self._retry(url, attempt)

    def events(self, url: str, body: Mapping[str, object]) -> Generator[dict[str, Any], None, None]:
        """Post a request and yield the JSON objects of the server-sent events in response.

        Only the beginning is tried again: a stream that breaks off is an error. Raises as `post`.
        """

        def attempt() -> Reply:
            return self._open_reply(url, body, answer_deadline(self.config.timeout_s, url))

        reply = self._retry(url, attempt)
        try:
            for data in self._split_events(reply, url):
                yield self._parse_event(data, reply.name)
        except Unreachable as error:
            raise ServerUnavailable(f"{reply.name} broke off its answer: {error.reason}") from error
        except UnreadableInput as error:
            raise ServerUnavailable(printable(error)) from error
        finally:
            reply.close()

    def _retry(self, url: str, attempt: Callable[[], Result]) -> Result:
        problem, config, name = "", self.config, shown_url(url)
        for index in range(config.num_tries):
            wait_s = min(config.first_wait_s * 2.0**index, config.max_wait_s)
            try:
                return attempt()
            except UnreadableInput as error:  # it would be as large the next time
                raise ServerUnavailable(printable(error)) from error
            except _BusyReply as error:
                problem = str(error)
                wait_s = min(error.wait_s(wait_s), config.max_wait_s)
            except Unreachable as error:
                problem = error.reason
            except BrokenReply as error:
                problem = self.hide_key(printable(error))
            if index + 1 < config.num_tries:
                logger.info("%s: %s; again in %.0f s", name, problem, wait_s)
                self.waits_s.append(wait_s)
                if self.closing.wait(wait_s):
                    break
        tries = f" in {config.num_tries} tries" if config.num_tries > 1 else ""
        raise ServerUnavailable(f"{name} gave no response{tries}: {problem}")

    def _open_reply(self, url: str, body: Mapping[str, object], deadline: Deadline) -> Reply:
        """Post a request and return the successful response before its body is read."""
        for num_refused in range(self._refused_flags.get(url, 0), len(ID_FLAGS)):
            fields = {**body, **ID_FLAGS[num_refused]}
            with self._counting:
                self.num_posted += 1
            reply = self._door.send("POST", url, deadline, fields)
            if reply.status not in _REFUSED:
                self._refused_flags[url] = num_refused
            # A server that has taken these flags once refuses something else.
            if num_refused >= self._refused_flags.get(url, len(ID_FLAGS)):
                break
            if num_refused + 1 < len(ID_FLAGS):
                reply.close()
        self._check_status(reply, deadline)
        return reply

    def _check_status(self, reply: Reply, deadline: Deadline) -> None:
        """Raise an error unless a response has status 200 to 299."""
        if 200 <= reply.status < 300:
            return
        words = self._quote_start(reply.body(deadline, MAX_BODY_BYTES))
        if 300 <= reply.status < 400:
            words = "it redirects elsewhere, which is not followed: give that address"
        problem = f"status {reply.status}" + (f": {words}" if words else "")
        if reply.status >= 500 or reply.status in _BUSY:
            raise _BusyReply(problem, reply.headers.get("retry-after"))
        if reply.status in UNAUTHORIZED:
            problem += KEY_HINT
        raise InvalidRequest(f"{reply.name} refuses the request with {problem}")

    def _quote_start(self, body: bytes) -> str:
        text = find_message(body) or body[:MAX_WORD_BYTES].decode(errors="replace")
        return printable(self.hide_key(text), max_length=300)

    def _parse(self, body: bytes) -> Any:
        try:
            return parse_json(body, "the answer")
        except UnreadableInput as error:
            raise BrokenReply(f"{error}; it begins with {self._quote_start(body)}") from error

    def _parse_event(self, data: bytes, name: str) -> dict[str, Any]:
        """Parse the JSON object of one server-sent event."""
        event = parse_json(data, f"an event of {name}")
        if not isinstance(event, dict) or "error" in event:
            raise ServerUnavailable(f"{name} sends {self._quote_start(data)}")
        return event

    def _split_events(self, reply: Reply, url: str) -> Iterator[bytes]:
        """Yield what follows `data:` in every line of a stream until its end marker."""
        whole, next_event = (
            answer_deadline(seconds, url)
            for seconds in (self.config.stream_s, self.config.timeout_s)
        )
        num_bytes, num_lines, rest = 0, 0, bytearray()
        while True:
            piece = reply.piece(min(whole, next_event, key=Deadline.remaining_s))
            if piece is None:
                raise ServerUnavailable(f"{reply.name} ended its answer before it was complete")
            num_bytes += len(piece)
            *ended, last = piece.split(b"\n")
            num_lines += len(ended)
            check_size(num_bytes, MAX_BODY_BYTES, reply.name)
            if num_lines > MAX_LINES:
                raise UnreadableInput(f"{reply.name} sends more than {MAX_LINES} lines, the limit")
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
                raise UnreadableInput(
                    f"{reply.name} sends a line over {MAX_LINE_BYTES} bytes, the limit"
                )
