"""Checks of a request before its body is read: host, API key, body size and rate limits."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import time
import uuid
from collections.abc import Callable, Sequence
from urllib.parse import quote

from fastapi import Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.errors import InvalidRequest
from forerun.server.config import ServerConfig
from forerun.server.errors import error_response
from forerun.server.keys import ApiKey, Keyring, LimitReached

logger = logging.getLogger("forerun.requests")

OPEN_PATHS = frozenset({"/", "/health", "/version"})
"""Paths that need no key; they reveal nothing of requests."""
OPEN_PREFIX = "/page/"
"""Files of the live page, which hold nothing of requests."""
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached only from this machine."""
    if host == "localhost":
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
    """ASGI middleware that refuses a request before it reaches the application.

    The key of the request is in `request.state.key`. `count` gets the status of every response.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        config: ServerConfig,
        keyring: Keyring,
        count: Callable[[int], None],
    ) -> None:
        self.app = app
        self.count = count
        self.config = config
        self.keyring = keyring
        names = LOCAL_NAMES | {config.host, *config.allowed_hosts}
        self._hosts = names if is_loopback(config.host) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with an error, or pass the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        has_begun, began_s = False, time.monotonic()
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if given.isascii() and 0 < len(given) <= 128 else uuid.uuid4().hex

        async def counted(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                self.count(message["status"])
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
                passed_ms = 1000 * (time.monotonic() - began_s)
                path = quote(scope["path"])  # a decoded path may hold line ends
                shown = scope["method"], path, message["status"], passed_ms, request_id
                logger.info("%s %.200s %d after %.0f ms, request %s", *shown)
            await send(message)

        try:
            await self._handle(scope, receive, counted)
        except asyncio.CancelledError:  # by the server, whose time to end has passed
            if not has_begun:
                await error_response("the server is stopping", 503)(scope, receive, counted)
            else:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Exception:
            if not has_begun:  # what is outside of this middleware answers
                self.count(500)
            raise

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        key = self.keyring.find(headers.get("authorization"))
        refused = self._refused(scope, headers, key)
        if refused is not None:
            await refused(scope, receive, send)
            return
        scope.setdefault("state", {})["key"] = key
        if key is None or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        try:
            with self.keyring.admitted(key):
                await self.app(scope, LimitedBody(receive, self.config), send)
        except LimitReached as limit:
            after = {"Retry-After": str(math.ceil(limit.retry_after_s))}
            response = error_response(str(limit), 429, code="rate_limit_exceeded", headers=after)
            await response(scope, receive, send)

    def _refused(self, scope: Scope, headers: Headers, key: ApiKey | None) -> Response | None:
        """Return the error response to a request that is refused; None for one that is accepted."""
        host = headers.get("host", "")
        if self._hosts is not None and _host_name(host) not in self._hosts:
            # A page of another site could reach this machine under a name of its own.
            return error_response(
                f"the Host header says {host!r:.200}, which is no name of this server: send the "
                "request to localhost, or start the server with --allowed-hosts",
                421,
            )
        path = scope["path"]
        if key is None and path not in OPEN_PATHS and not path.startswith(OPEN_PREFIX):
            return error_response(
                "a valid API key is needed, as in Authorization: Bearer KEY",
                401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self.config.max_body_bytes:
            return error_response(_too_long(self.config), 413)
        return None


def _host_name(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host


def _too_long(config: ServerConfig) -> str:
    return f"the body is longer than {config.max_body_bytes} bytes, the most this server reads"


class LimitedBody:
    """Receives a body within limits of size and time."""

    def __init__(self, receive: Receive, config: ServerConfig) -> None:
        self.receive = receive
        self.config = config
        self.num_bytes = 0
        self.is_complete = False
        self.ends_at_s = asyncio.get_running_loop().time() + config.body_timeout_s

    async def __call__(self) -> Message:
        """Return the next message."""
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
            raise HTTPException(413, _too_long(self.config))
        return message
