"""The entry point of `vllm.endpoint_plugins`: the live page at `/forerun/` of vLLM's server.

vLLM checks its keys below /v1 and a few other paths alone, so what is mounted here checks them
itself. As on forerun's own server the files of the page, which hold no figures, need no key.
"""

from __future__ import annotations

import hashlib
import os
from argparse import Namespace
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Body, FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Receive, Scope, Send

from forerun.errors import ForerunError
from forerun.server.config import ServerConfig
from forerun.server.errors import error_response, response_for
from forerun.server.guard import ApiKey, Guard, Keyring
from forerun.server.live_page import page_router
from forerun.vllm_plugin.observer import VllmObserver, logger

ROOT = "/forerun"
MAX_BODY_BYTES = 64 << 10
MAX_ANSWERS = 200


class ForerunEndpoint:
    """The live page below `ROOT` of vLLM's server: mounted first, then given the engine."""

    name = "forerun"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._page: ASGIApp = error_response("forerun is off; vLLM's log says why", 503)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request below `ROOT`."""
        await self._page(scope, receive, send)

    def attach_router(self, app: FastAPI) -> None:
        """Mount the page; an exception would end vLLM's server."""
        app.mount(ROOT, self)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Find the observer among the loggers of the engine, and the keys among the arguments."""
        try:
            from forerun.vllm_plugin.stat_logger import ForerunStatLogger

            for each in engine_client.logger_manager.stat_loggers:
                if isinstance(each, ForerunStatLogger) and each.observer is not None:
                    keys = args.api_key or [os.environ.get("VLLM_API_KEY")]
                    self._page = create_page(each.observer, [key for key in keys if key])
                    logger.info("forerun shows what speculation does at %s/", ROOT)
        except Exception:  # noqa: BLE001  # another version's engine or arguments
            logger.exception("forerun's page is off, vLLM goes on")


def create_page(observer: VllmObserver, keys: Sequence[str]) -> ASGIApp:
    """Return the application of the page and all metrics; figures need one of these keys."""
    app = FastAPI(openapi_url=None)
    app.add_exception_handler(ForerunError, response_for)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(observer.read_metrics(), media_type=CONTENT_TYPE_LATEST)

    @app.post("/live/answers")
    def answers(
        answers: Annotated[
            dict[str, str | float | bool | None], Body(embed=True, max_length=MAX_ANSWERS)
        ],
    ) -> Response:
        found = observer.ask(answers)
        return Response(found, media_type="application/json", headers={"Cache-Control": "no-store"})

    app.include_router(page_router(observer))
    known = [ApiKey(tenant="vllm", sha256=hashlib.sha256(key.encode()).hexdigest()) for key in keys]
    config = ServerConfig(host="0.0.0.0", max_body_bytes=MAX_BODY_BYTES)  # vLLM's host is its own
    return Guard(app, config=config, keyring=Keyring(known), count=lambda _: None, root=ROOT)
