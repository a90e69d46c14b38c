"""Requests to an OpenAI-compatible endpoint over HTTP, with retries and limits.

What comes back is read within limits on bytes and seconds, because a server may be broken or
hostile. Busy and failing servers are tried again; a refusal is final.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any, TypeVar

import httpx

from forerun.bounded_documents import parse_json
from forerun.bounded_read import ReadLimits, collected
from forerun.errors import InvalidRequest, ServerUnavailable, UnreadableInput
from forerun.sampling.config import SamplingParams
from forerun.terminal_text import printable

logger = logging.getLogger("forerun.engine")

API_KEY = "OPENAI_API_KEY"
REFUSED = (400, 422)
UNAUTHORIZED = (401, 403)
BUSY = (408, 409, 425, 429)
ID_FLAGS: tuple[Mapping[str, object], ...] = (
    {"return_token_ids": True, "return_tokens_as_token_ids": True},
    {"return_token_ids": True},
    {},
)
"""Flags that ask vLLM and forerun for token ids; a strict server refuses those it does not know."""
CONNECT_S = 10.0
MAX_BODY_BYTES = 1 << 26
"""Of one answer, unpacked: 30,000 tokens with 20 log-probabilities each take half of it."""
ENCODINGS = ("identity", "gzip", "deflate")
EXTENSIONS = (
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "allowed_token_ids",
)
"""Sent where they differ from their defaults: not every server accepts all but the first two."""
DEFAULTS = SamplingParams()

Result = TypeVar("Result")


class BrokenReply(Exception):
    """Raised if a server's response violates the protocol; a retry may help."""


def sampling_fields(params: SamplingParams) -> dict[str, object]:
    """Return sampling parameters under the names of the OpenAI API and vLLM, without the seed.

    Raises:
        InvalidRequest: there is no limit to the output, or a parameter that no protocol has.
    """
    if params.max_tokens is None:
        raise InvalidRequest("max_tokens is not set; servers then stop after 16 tokens: set it")
    if params.bad_token_ids:
        raise InvalidRequest("bad_token_ids cannot be asked of a server; use logit_bias")
    found: dict[str, object] = {
        name: getattr(params, name) for name in ("temperature", "top_p", "max_tokens")
    }
    if params.stop:
        found["stop"] = list(params.stop)
    if params.logit_bias:
        found["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    for name in EXTENSIONS:
        value = getattr(params, name)
        if value != getattr(DEFAULTS, name):
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


def client_for(
    timeout_s: float, max_connections: int, key_variable: str | None = None
) -> httpx.Client:
    """Return an HTTP client that sends the API key of the environment.

    Args:
        timeout_s: seconds to wait for each part of an answer; for a connection at most 10.
        max_connections: connections at once.
        key_variable: environment variable with the key; None takes OPENAI_API_KEY if it is set.

    Raises:
        InvalidRequest: the named variable is not set, or its value cannot be sent.
    """
    key = os.environ.get(key_variable or API_KEY, "")
    if key_variable is not None and not key:
        raise InvalidRequest(f"the environment variable {key_variable!r}, for a key, is not set")
    if not (key.isascii() and key.isprintable()):
        raise InvalidRequest(f"{key_variable or API_KEY} is no API key: it has special characters")
    authorization = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(
        timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S)),
        headers={"Accept-Encoding": "gzip"} | authorization,
        limits=httpx.Limits(max_connections=max_connections),
    )


@dataclass(slots=True, kw_only=True, eq=False)
class Endpoint:
    """Client of one URL with retries and limits; several threads may use it at once.

    Attributes:
        url: where requests are posted.
        client: what carries them.
        num_tries: of a request, before the server counts as broken.
        first_wait_s: before the second try; doubled for every further one.
        max_wait_s: most seconds between two tries, also if the server asks for more.
        timeout_s: seconds to wait for a whole answer.
        closing: set when the answers are not needed any more; all waiting then ends.
        num_refused_flags: of `ID_FLAGS`, how many the server has refused.
        waits_s: seconds waited before every further try of a request.
    """

    url: str
    client: httpx.Client
    num_tries: int = 7
    first_wait_s: float = 1.0
    max_wait_s: float = 60.0
    timeout_s: float = 600.0
    closing: Event = field(default_factory=Event)
    num_refused_flags: int = field(default=0, init=False)
    waits_s: list[float] = field(default_factory=list, init=False)

    def ask(
        self, body: Mapping[str, object], read: Callable[[Any], Result], where: str = "the request"
    ) -> Result:
        """Post a request and return the result of `read` on the JSON of the response.

        Args:
            body: of the request.
            read: may raise BrokenReply, after which the request is posted again.
            where: what an error calls the request.

        Raises:
            InvalidRequest: the server refuses the request.
            ServerUnavailable: no answer came after as many tries as were allowed.
        """

        def attempt() -> Result:
            reply = self._posted(body)
            check_status(reply, self.url, where)
            return read(parsed(reply))

        return self._tried(attempt)

    def events(
        self, body: Mapping[str, object], where: str = "the request"
    ) -> Generator[dict[str, Any], None, None]:
        """Post a request and yield the JSON objects of the server-sent events in response.

        Only the beginning is tried again: a stream that breaks off is an error.

        Raises:
            InvalidRequest: the server refuses the request.
            ServerUnavailable: there is no answer, or it breaks off.
        """
        reply = self._tried(lambda: self._opened(body, where))
        try:
            yield from _events_of(reply, self.url)
        except httpx.TransportError as error:
            raise ServerUnavailable(
                f"{self.url} broke off its answer: {printable(error) or type(error).__name__}"
            ) from error
        finally:
            reply.close()

    def _tried(self, attempt: Callable[[], Result]) -> Result:
        problem = ""
        for index in range(self.num_tries):
            wait_s = min(self.first_wait_s * 2.0**index, self.max_wait_s)
            try:
                return attempt()
            except UnreadableInput as error:  # it would be as large the next time
                raise ServerUnavailable(printable(error)) from error
            except BusyReply as error:
                problem = printable(error)
                wait_s = min(error.wait_s(wait_s), self.max_wait_s)
            except (httpx.TransportError, BrokenReply) as error:
                problem = printable(error) or type(error).__name__
            if index + 1 < self.num_tries:
                logger.info("%s: %s; again in %.0f s", self.url, problem, wait_s)
                self.waits_s.append(wait_s)
                if self.closing.wait(wait_s):
                    break
        raise ServerUnavailable(f"{self.url} gave no response in {self.num_tries} tries: {problem}")

    def _posted(self, body: Mapping[str, object]) -> httpx.Response:
        """Post a request and read the response; flags for token ids are dropped if refused."""
        for refused in range(self.num_refused_flags, len(ID_FLAGS)):
            with self._sent({**body, **ID_FLAGS[refused]}) as reply:
                read_whole(reply, self.url, self.timeout_s)
            if reply.status_code not in REFUSED:
                self.num_refused_flags = refused
                break
        return reply

    def _opened(self, body: Mapping[str, object], where: str) -> httpx.Response:
        """Post a request and return the response before its body is read."""
        for refused in range(self.num_refused_flags, len(ID_FLAGS)):
            with self._kept({**body, **ID_FLAGS[refused]}) as reply:
                if reply.is_success:
                    self.num_refused_flags = refused
                    return reply
                read_whole(reply, self.url, self.timeout_s)
            if reply.status_code not in REFUSED:
                break
        check_status(reply, self.url, where)
        raise BrokenReply(f"status {reply.status_code}")

    @contextmanager
    def _kept(self, body: Mapping[str, object]) -> Iterator[httpx.Response]:
        """Post a request and yield the response, which is closed if an error is raised."""
        request = self.client.build_request("POST", self.url, json=body)
        reply = self.client.send(request, stream=True)
        try:
            check_encoding(reply, self.url)
            yield reply
        except BaseException:
            reply.close()
            raise
        if not reply.is_success:
            reply.close()

    @contextmanager
    def _sent(self, body: Mapping[str, object]) -> Iterator[httpx.Response]:
        with self.client.stream("POST", self.url, json=body) as reply:
            check_encoding(reply, self.url)
            yield reply


class BusyReply(BrokenReply):
    """Raised if a server is busy or failing, with the seconds to wait before a retry."""

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


def check_encoding(reply: httpx.Response, url: str) -> None:
    """Refuse content encodings that httpx would decompress without a size limit."""
    encoding = reply.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ENCODINGS:
        raise UnreadableInput(f"{url} sends a body of content encoding {encoding!r}")


def read_whole(reply: httpx.Response, url: str, max_seconds: float) -> None:
    """Read the body of a response into `reply.extensions`, within size and time limits."""
    limits = ReadLimits(max_bytes=MAX_BODY_BYTES, max_seconds=max_seconds)
    reply.extensions["body"] = collected(reply.iter_bytes(), url, limits)


def _start_of(reply: httpx.Response) -> str:
    body: bytes = reply.extensions["body"]
    return printable(body[:600].decode(errors="replace"), max_length=300)


def check_status(reply: httpx.Response, url: str, where: str) -> None:
    """Raise an error unless a response has status 200 to 299."""
    if reply.is_success:
        return
    problem = f"status {reply.status_code}: {_start_of(reply)}"
    if reply.status_code >= 500 or reply.status_code in BUSY:
        raise BusyReply(problem, reply.headers.get("retry-after"))
    if reply.status_code in UNAUTHORIZED:
        problem += f" (the key sent is that of {API_KEY}, unless another variable is named)"
    raise InvalidRequest(f"{where}: {url} refuses it with {problem}")


def parsed(reply: httpx.Response) -> Any:
    """Parse the body of a response as JSON.

    Raises:
        BrokenReply: it is not JSON, or nests too deeply.
    """
    try:
        return parse_json(reply.extensions["body"], "the answer")
    except UnreadableInput as error:
        raise BrokenReply(f"{error}; it begins with {_start_of(reply)}") from error


def _events_of(reply: httpx.Response, url: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a server-sent event stream until its end marker."""
    num_bytes, rest = 0, b""
    for chunk in reply.iter_bytes():
        num_bytes += len(chunk)
        if num_bytes > MAX_BODY_BYTES:
            raise ServerUnavailable(f"{url} sends more than {MAX_BODY_BYTES} bytes, the limit")
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data == b"[DONE]":
                return
            if data:
                yield _event_of(data, url)
    raise ServerUnavailable(f"{url} ended its answer before it was complete")


def _event_of(data: bytes, url: str) -> dict[str, Any]:
    """Parse the JSON object of one server-sent event."""
    try:
        event = parse_json(data, "an event")
    except UnreadableInput as error:
        raise ServerUnavailable(f"{url}: {printable(error)}") from error
    if not isinstance(event, dict) or "error" in event:
        raise ServerUnavailable(f"{url} sends {printable(str(event), max_length=300)}")
    return event
