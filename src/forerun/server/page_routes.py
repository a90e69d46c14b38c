"""Routes of the live page: its static files, and the JSON that it requests.

Nothing is loaded from other hosts, and the content policy allows no inline script, so that text of
a prompt or a model stays text even if the page had a defect.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any, Protocol, runtime_checkable

import msgspec
from fastapi import APIRouter
from starlette.background import BackgroundTask
from starlette.responses import Response

from forerun.server.live_types import LiveSnapshot

__all__ = ["LiveSource", "page_router"]

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
SECURITY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
MAX_AGE_S = 0.5
"""For which several open pages get the same snapshot."""


@runtime_checkable
class LiveSource(Protocol):
    """Provides the snapshots of the live page, for our engine or for another server."""

    def snapshot(self) -> LiveSnapshot:
        """Return the latest snapshot; any thread may call this."""

    def diagnose(self) -> None:
        """Update the diagnosis if the last one is old enough, which may take ten milliseconds."""


class EncodedSnapshots:
    """Encodes snapshots, at most one per `MAX_AGE_S` however many pages are open."""

    def __init__(self, source: LiveSource, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock = clock
        self._lock = threading.Lock()
        self._made_s = float("-inf")
        self._body = b""

    def body(self) -> bytes:
        """Return a snapshot as JSON."""
        with self._lock:
            now_s = self._clock()
            if now_s - self._made_s >= MAX_AGE_S:
                self._body = msgspec.json.encode(self._source.snapshot())
                self._made_s = now_s
            return self._body


def page_router(source: LiveSource, dependencies: Sequence[Any] = ()) -> APIRouter:
    """Return the routes `/`, `/page/...` and `/live`.

    Args:
        source: what `/live` shows.
        dependencies: FastAPI dependencies of `/live`, such as the check of an API key; the files of
            the page hold nothing secret and need none.
    """
    router = APIRouter()
    snapshots = EncodedSnapshots(source)
    contents = page_files()

    @router.get("/", include_in_schema=False)
    async def index() -> Response:
        return contents["index.html"]()

    @router.get("/page/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        found = contents.get(name)
        return Response("no such file", status_code=404) if found is None else found()

    @router.get("/live", dependencies=list(dependencies), summary="What the server does now")
    def live() -> Response:
        return Response(
            snapshots.body(),
            media_type="application/json",
            headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"},
            background=BackgroundTask(source.diagnose),
        )

    return router


def page_files() -> dict[str, Callable[[], Response]]:
    """Return functions by file name that create a response with a file of the page."""
    found: dict[str, Callable[[], Response]] = {}
    for file in (files("forerun.server") / "page").iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in MEDIA_TYPES:
            found[file.name] = response_maker(file.read_bytes(), MEDIA_TYPES[suffix])
    return found


def response_maker(content: bytes, media_type: str) -> Callable[[], Response]:
    """Return a function that creates responses with this content."""
    return lambda: Response(content, media_type=media_type, headers=SECURITY)
