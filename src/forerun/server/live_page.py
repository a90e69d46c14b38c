"""The live page: its static files, and the route of the snapshots that it requests as JSON.

Nothing is loaded from other hosts, and the content policy allows no inline script, so that text of
a prompt or a model stays text even if the page had a defect.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from starlette.background import BackgroundTask
from starlette.responses import Response

from forerun.server.live import LiveView

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


def page_router(view: LiveView) -> APIRouter:
    """Return the routes `/`, `/page/...` and `/live`."""
    router = APIRouter()
    folder = files("forerun.server") / "page"
    contents = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}

    @router.get("/")
    async def index() -> Response:
        return await file("index.html")

    @router.get("/page/{name}")
    async def file(name: str) -> Response:
        media_type = MEDIA_TYPES.get("." + name.rpartition(".")[2])
        if name not in contents or media_type is None:
            return Response("no such file", status_code=404)
        return Response(contents[name], media_type=media_type, headers=SECURITY)

    @router.get("/live")
    def live() -> Response:
        return Response(
            view.encoded(),
            media_type="application/json",
            headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"},
            background=BackgroundTask(view.diagnose),
        )

    return router
