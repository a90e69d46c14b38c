"""Checks of a request before its body is read: host, API key, body size and rate limits."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import time
import tomllib
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import msgspec
from fastapi import FastAPI, Request, Response
from msgspec import Meta
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.bounded_read import ReadLimits, first_line, read_bytes
from forerun.errors import InvalidRequest, explain_invalid
from forerun.server.config import ServerConfig
from forerun.server.errors import LimitReached, error_response, response_for
from forerun.server.request_log import log_request

MIN_KEY_CHARACTERS = 16
KEY_FILE = ReadLimits(max_bytes=1 << 20)
BUSY_RETRY_S = 1.0


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One API key: its tenant and its limits.

    Attributes:
        tenant: requests of one tenant may share KV of a common beginning; those of two do not.
        sha256: of the key, in hexadecimal digits; None for requests without a key.
        requests_per_minute: on average; as many may come at once after a minute of silence.
        max_concurrent: requests that may be worked on at once.
        max_tokens: output tokens of a request, all its choices together.
        priority: the most urgent (lowest) priority that a request may ask for.
        collect: whether texts of requests that say nothing of `store` may be kept for training.
    """

    tenant: Annotated[str, Meta(min_length=1)]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")] | None = None
    requests_per_minute: Annotated[float, Meta(gt=0.0, le=1e9)] | None = None
    max_concurrent: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    priority: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)] = 0
    collect: bool = False

    def check(self, priority: int, num_choices: int, max_tokens: int | None) -> None:
        """Refuse a request that exceeds the limits of its key; raises InvalidRequest.

        `num_choices` counts all choices of it; each has `max_tokens`, None to the end of the
        context.
        """
        if self.sha256 is not None and priority < self.priority:
            raise InvalidRequest(
                f"priority is {priority}; this key may ask for {self.priority} and above"
            )
        most = self.max_tokens
        if most is not None and (max_tokens is None or num_choices * max_tokens > most):
            asked = "the rest of the context" if max_tokens is None else f"{max_tokens} tokens"
            raise InvalidRequest(
                f"the request asks for {num_choices} choices of {asked}; this key may have {most} "
                "output tokens per request: lower max_tokens or n"
            )

    @classmethod
    def of(cls, tenant: str, key: str) -> ApiKey:
        """Return an entry without limits for a key in plain text, long enough to be a secret."""
        return cls(tenant=tenant, sha256=_digest_of(key))


def _digest_of(key: object) -> str:
    """Return the SHA-256 of a key; one that is too short or that no header holds is refused."""
    if not isinstance(key, str):
        raise InvalidRequest(f"an API key is a {type(key).__name__}; it must be a text in quotes")
    if not (key.isascii() and key.isprintable()) or key != key.strip():
        raise InvalidRequest("an API key has characters that a request cannot send; use ASCII")
    if len(key) < MIN_KEY_CHARACTERS:
        raise InvalidRequest(
            f"an API key has {len(key)} characters; it needs {MIN_KEY_CHARACTERS}: make one with "
            "`openssl rand -hex 32`"
        )
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: Path) -> list[ApiKey]:
    """Read the keys of a TOML file, one table `[[keys]]` each, with `key` or its `sha256`.

    Raises:
        InvalidRequest: it is no such file, or an entry is wrong; the message names it.
        UnreadableInput: it cannot be read.
    """
    try:
        tables = tomllib.loads(read_bytes(path, KEY_FILE).decode()).get("keys", [])
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not TOML: {first_line(error)}") from error
    if not isinstance(tables, list) or not tables:
        raise InvalidRequest(f"{path} has no [[keys]] table; give one for each key")
    return [key_of(table, f"{path}, key {n}") for n, table in enumerate(tables, start=1)]


def key_of(table: object, name: str) -> ApiKey:
    """Return the key of one table."""
    if not isinstance(table, dict):
        raise InvalidRequest(f"{name} is no table; give a tenant, and key or sha256")
    values = dict(table)
    key = values.pop("key", None)
    if (key is None) == ("sha256" not in values):
        raise InvalidRequest(f"{name} needs one of key and sha256")
    try:
        if key is not None:
            values["sha256"] = _digest_of(key)
        return msgspec.convert(values, ApiKey)
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error}") from error
    except msgspec.ValidationError as error:
        # What stands there may be a key itself.
        reason = explain_invalid(error, values | {"sha256": "hidden"}, ApiKey)
        raise InvalidRequest(f"{name}: {reason}") from error


NO_KEY = ApiKey(tenant="everyone")
"""Key of all requests if the server has no keys."""


class Keyring:
    """Finds the API key of a request, and counts the running requests of each key, on one thread.

    Without any keys every request is let in. `max_requests` limits those of all keys together.
    """

    def __init__(
        self,
        keys: Sequence[ApiKey] = (),
        max_requests: int = 512,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.keys = tuple(keys)
        self.max_requests = max_requests
        self._clock = clock
        self._running = Counter[ApiKey]()
        self._allowances: dict[ApiKey, tuple[float, float]] = {}

    @property
    def num_running(self) -> int:
        return self._running.total()

    def find(self, authorization: str | None) -> ApiKey | None:
        """Return the key in an `Authorization: Bearer` header; None if it is unknown.

        The time it takes depends neither on the key nor on where it differs from a known one.
        """
        if not self.keys:
            return NO_KEY
        scheme, _, given = (authorization or "").partition(" ")
        digest = hashlib.sha256(given.strip().encode()).hexdigest()
        found = None
        for key in self.keys:
            if hmac.compare_digest(digest, key.sha256 or ""):
                found = key
        return found if scheme.lower() == "bearer" else None

    @contextmanager
    def admitted(self, key: ApiKey) -> Iterator[None]:
        """Count a request as running while the block runs, or refuse it at a limit."""
        running = self._running[key]
        if self.num_running >= self.max_requests:
            raise LimitReached(
                f"{self.num_running} requests are being worked on, at most {self.max_requests} may",
                BUSY_RETRY_S,
            )
        if key.max_concurrent is not None and running >= key.max_concurrent:
            raise LimitReached(
                f"{running} requests of this key are being worked on, at most "
                f"{key.max_concurrent} may",
                BUSY_RETRY_S,
            )
        self._use_allowance(key)
        self._running[key] += 1
        try:
            yield
        finally:
            self._running[key] -= 1

    def _use_allowance(self, key: ApiKey) -> None:
        """Take one request from the token bucket of a key, which holds a minute's allowance."""
        rate = key.requests_per_minute
        if rate is None:
            return
        now_s = self._clock()
        most = max(1.0, rate)
        left, at_s = self._allowances.get(key, (most, now_s))
        left = min(most, left + (now_s - at_s) * rate / 60)
        if left < 1:
            self._allowances[key] = (left, now_s)
            raise LimitReached(
                f"this key may send {rate:g} requests per minute", (1 - left) * 60 / rate
            )
        self._allowances[key] = (left - 1, now_s)


PAGE_FILES = frozenset(file.name for file in (files("forerun.server") / "page").iterdir())
OPEN = frozenset(
    ("GET", path.encode())
    for path in ("/", "/health", "/ready", "/version", *(f"/page/{name}" for name in PAGE_FILES))
)
"""Methods and paths, byte for byte as they are sent, that need no key; everything else does."""
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached only from this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(config: ServerConfig, keys: Sequence[ApiKey]) -> None:
    """Refuse an address that other machines can reach, if no key is set; raises InvalidRequest."""
    if not keys and not is_loopback(config.host):
        raise InvalidRequest(
            f"--host {config.host} is reachable from other machines, which needs API keys: give "
            "--api-keys FILE, or set FORERUN_API_KEY"
        )


class Guard:
    """ASGI middleware that refuses a request before it reaches the application, and logs its end.

    The key of the request is in `request.state.key`. The application may put "figures" for the line
    of the log into the state, and "has_left" where the client disconnected. `count` gets the status
    of every response. `root` is the path below which the application is mounted in another one.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        config: ServerConfig,
        keyring: Keyring,
        count: Callable[[int], None],
        root: str = "",
    ) -> None:
        self.app = app
        self.root = root.encode()
        self.count = count
        self.config = config
        self.keyring = keyring
        names = LOCAL_NAMES | {name.lower() for name in (config.host, *config.allowed_hosts)}
        self._hosts = names if is_loopback(config.host) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with an error, or pass the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began_s, status = time.monotonic(), 0  # 0: the response has not begun
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if given.isascii() and 0 < len(given) <= 128 else uuid.uuid4().hex

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self.count(status)
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._handle(scope, receive, noted)
        except asyncio.CancelledError:  # by the server, whose time to end has passed
            if not status:
                await error_response("the server is stopping", 503)(scope, receive, noted)
            else:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Exception as error:  # noqa: BLE001  # logged, and the server goes on
            response = await response_for(Request(scope), error)
            if not status:
                await response(scope, receive, noted)
        finally:
            log_request(scope, request_id, status, time.monotonic() - began_s)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        key = self.keyring.find(headers.get("authorization"))
        refused = self._refuse(scope, headers, key)
        if refused is not None:
            await refused(scope, receive, send)
            return
        scope.setdefault("state", {})["key"] = key
        body = LimitedBody(receive, self.config)
        if key is None or scope["method"] not in ("POST", "DELETE"):
            await self.app(scope, body, send)
            return
        with self.keyring.admitted(key):
            await self.app(scope, body, send)

    def _refuse(self, scope: Scope, headers: Headers, key: ApiKey | None) -> Response | None:
        """Return the error response to a request that is refused; None for one that is accepted."""
        host = headers.get("host", "")
        if self._hosts is not None and _cut_port(host) not in self._hosts:
            # The name of another site may resolve to this machine (DNS rebinding).
            return error_response(
                f"the Host header says {host!r:.200}, which is no name of this server: send the "
                "request to localhost, or start the server with --allowed-hosts",
                421,
            )
        path = scope.get("raw_path") or quote(scope["path"]).encode()
        if key is None and (scope["method"], path.removeprefix(self.root)) not in OPEN:
            return error_response(
                "a valid API key is needed, as in Authorization: Bearer KEY",
                401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self.config.max_body_bytes:
            return error_response(_describe_limit(self.config), 413)
        return None


def _cut_port(host: str) -> str:
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdecimal() else host.lower()


def _describe_limit(config: ServerConfig) -> str:
    return f"the body is longer than {config.max_body_bytes} bytes, the most this server reads"


def protect(
    app: FastAPI, config: ServerConfig, keys: Sequence[ApiKey], count: Callable[[int], None]
) -> None:
    """Let only allowed requests reach an application, and pages of allowed origins call it."""
    keyring = Keyring(keys)
    app.add_middleware(Guard, config=config, keyring=keyring, count=count)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-forerun-ignored"],
        )


class LimitedBody:
    """Receives a body within limits of size and time."""

    def __init__(self, receive: Receive, config: ServerConfig) -> None:
        self.receive = receive
        self.config = config
        self.num_bytes = 0
        self.is_complete = False
        self.ends_at_s = asyncio.get_running_loop().time() + config.body_timeout_s

    async def __call__(self) -> Message:
        if self.is_complete:
            return await self.receive()  # waits for the client to leave
        try:
            async with asyncio.timeout_at(self.ends_at_s):
                message = await self.receive()
        except TimeoutError:
            raise HTTPException(
                408, f"the body did not come within {self.config.body_timeout_s:g} s"
            ) from None
        self.num_bytes += len(message.get("body", b""))
        self.is_complete = not message.get("more_body", False)
        if self.num_bytes > self.config.max_body_bytes:
            raise HTTPException(413, _describe_limit(self.config))
        return message
