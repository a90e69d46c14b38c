"""The log of a server: one line per request, as text or JSON, with times; it holds no texts."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.server.config import LogFormat
from forerun.terminal_text import printable

logger = logging.getLogger("forerun.requests")

CLIENT_LEFT = 499
"""Status, as in nginx, of a request whose client disconnected before the response was complete."""
SAFE = "/:,@"
INFORMATIVE = ("forerun.requests", "forerun.server", "forerun.control")
"""Loggers of which a server also shows lines of the level INFO."""


class RequestLog:
    """An ASGI application around another one that writes one line for each request when it ends.

    The inner application puts "figures" of the request into `scope["state"]`, and "has_left" where
    the client disconnected. An error that it answered is not raised again.

    Attributes:
        is_draining: whether the server ends; it is then not ready.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and log it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began_s, found = time.monotonic(), dict[str, Any]()
        state = scope.setdefault("state", {})
        state["is_draining"] = self.is_draining

        async def note_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                found["status"] = message["status"]
                found["id"] = Headers(raw=message.get("headers", [])).get("x-request-id", "")
            await send(message)

        try:
            await self.app(scope, receive, note_status)
        except Exception:
            if "status" not in found:
                raise
        finally:
            status = CLIENT_LEFT if state.get("has_left") else found.get("status", 500)
            is_poll = scope["method"] in ("GET", "HEAD") and status < 400
            key = state.get("key")
            fields = {
                "id": found.get("id", ""),
                **({} if key is None or key.sha256 is None else {"key": key.tenant}),
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": status,
                "seconds": round(time.monotonic() - began_s, 4),
                **state.get("figures", {}),
            }
            words = " ".join(
                f"{name}={quote(str(value), safe=SAFE)}" for name, value in fields.items()
            )
            level = logging.DEBUG if is_poll else logging.INFO
            logger.log(level, "request %s", words, extra={"fields": fields})


class LineFormatter(logging.Formatter):
    """Formats a record as one line with its time; in JSON an error has its traceback as a text."""

    def __init__(self, form: LogFormat) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime
        self.form = form

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        if self.form == "text":
            return printable(super().format(record), keep="\n")
        fields: dict[str, Any] | None = getattr(record, "fields", None)
        found = {
            "time": f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": "request" if fields else record.getMessage(),
            **(fields or {}),
        }
        if record.exc_info:
            found["error"] = self.formatException(record.exc_info)
        return json.dumps(found)


@contextmanager
def log_on_stderr(form: LogFormat) -> Iterator[None]:
    """Write the log of a server to stderr while the block runs, in place of other notices."""
    root, package = logging.getLogger(), logging.getLogger("forerun")
    before, package.handlers[:] = package.handlers[:], []
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(form))
    root.addHandler(handler)
    levels = {name: logging.getLogger(name).level for name in INFORMATIVE}
    for name in levels:
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        package.handlers[:] = before
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
