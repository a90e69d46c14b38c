"""The log of a server: one line per request when it ends, with its time; it holds no texts."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

from starlette.types import Scope

from forerun.terminal_text import printable

logger = logging.getLogger("forerun.requests")

CLIENT_LEFT = 499
"""Status, as in nginx, of a request whose client disconnected before the response was complete."""
SAFE = "/:,@"
INFORMATIVE = ("forerun.requests", "forerun.server", "forerun.control")
"""Loggers of which a server also shows lines of the level INFO."""


def log_request(scope: Scope, request_id: str, status: int, seconds: float) -> None:
    """Write the line of a request that has ended; polls are lines of the level DEBUG."""
    state = scope.get("state", {})
    status = CLIENT_LEFT if state.get("has_left") else status
    key = state.get("key")
    fields = {
        "id": request_id,
        **({} if key is None or key.sha256 is None else {"key": key.tenant}),
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": status,
        "seconds": round(seconds, 4),
        **state.get("figures", {}),
    }
    is_poll = scope["method"] in ("GET", "HEAD") and status < 400
    words = " ".join(f"{name}={quote(str(value), safe=SAFE)}" for name, value in fields.items())
    logger.log(logging.DEBUG if is_poll else logging.INFO, "request %s", words)


class LineFormatter(logging.Formatter):
    """Formats a record as one line with its time, and a traceback below it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return printable(super().format(record), keep="\n")


@contextmanager
def log_on_stderr() -> Iterator[None]:
    """Write the log of a server to stderr while the block runs, in place of other notices."""
    root, package = logging.getLogger(), logging.getLogger("forerun")
    before, package.handlers[:] = package.handlers[:], []
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
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
