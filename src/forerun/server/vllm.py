"""Runs vLLM with a speculative configuration behind a proxy that adds the live page."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from forerun.bounded_read import ReadLimits, parse_json, read_bytes
from forerun.client.door import Forwarder, PassedReply, fetch_page
from forerun.drafters.config import parse_drafter
from forerun.errors import ForerunError, InvalidRequest, ServerUnavailable, UnreadableInput
from forerun.models.catalog import PREFIX, zoo_path
from forerun.server.app import Disconnected, while_connected
from forerun.server.bodies import parsed
from forerun.server.config import ServerConfig
from forerun.server.errors import error_response, response_for
from forerun.server.guard import ApiKey, protect
from forerun.server.live_page import LiveSource, page_router
from forerun.server.request_log import CLIENT_LEFT

_HOP_HEADERS = frozenset(
    "connection content-length date host keep-alive origin te trailer transfer-encoding "
    "upgrade proxy-authenticate proxy-authorization authorization".split()
)
"""Headers that hold for one connection alone, and those that are decided here: keys, origins."""
PAGE = ReadLimits(max_bytes=1 << 25, max_seconds=5.0)
"""Limits of what is read of vLLM itself, such as its metrics."""
logger = logging.getLogger("forerun.server")


DEFAULT_K = 4
UNNAMED_DRAFT = "draft"
"""Name in a plan of a draft that was described by its size alone."""
START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 30.0


def vllm_name(model: str) -> str:
    """Return the name or folder under which vLLM can load a model."""
    return str(zoo_path(model)) if model.startswith(PREFIX) else model


def speculative_config(
    draft: str | None, num_speculative_tokens: int | None, recommended: Path | None = None
) -> dict[str, object]:
    """Return vLLM's `--speculative-config`; empty for decoding without a draft.

    An aligned draft has the settings that its alignment found best in `serving/vllm.json`.

    Args:
        draft: folder or name of a draft model, "suffix", "ngram", or None.
        num_speculative_tokens: K; None takes that of the recommendation or the alignment, or 4.
        recommended: file with a configuration: what an alignment exported, what `forerun plan
            --json` printed, or a speculative configuration of vLLM itself.

    Raises:
        InvalidRequest: the settings of an alignment cannot be read, the file holds none, or vLLM
            has no such drafter.
    """
    if num_speculative_tokens == 0:
        return {}
    k = {} if num_speculative_tokens is None else {"num_speculative_tokens": num_speculative_tokens}
    if recommended is not None:
        return _chosen_in(recommended, draft, k)
    if draft is None:
        return {}
    if draft in ("suffix", "ngram"):
        return {"method": draft, "num_speculative_tokens": DEFAULT_K} | k
    if parse_drafter(draft) is not None:
        raise InvalidRequest(f"vLLM has no drafter {draft!r}: use a draft model, suffix or ngram")
    model = vllm_name(draft)
    path = Path(model) / "serving" / "vllm.json"
    if path.is_file():
        return _chosen_in(path, model, k)
    return {"method": "draft_model", "model": model, "num_speculative_tokens": DEFAULT_K} | k


def _chosen_in(path: Path, draft: str | None, changes: Mapping[str, object]) -> dict[str, object]:
    """Return the speculative configuration of a file with changes; empty for plain decoding."""
    content = parse_json(read_bytes(path), path.name)
    settings = content if isinstance(content, dict) else {}
    if isinstance(best := settings.get("best"), dict):
        return planned(path, best, draft, changes)
    if "num_speculative_tokens" in settings:
        return settings | dict(changes)
    found = settings.get("speculative_config", {})
    if "model" not in settings or not isinstance(found, dict):
        raise InvalidRequest(
            f"{path} has no speculative_config that is an object: give the serving/vllm.json of an "
            "alignment, the output of forerun plan --json, or a configuration of vLLM"
        )
    return found | dict(changes) if found else {}


def planned(
    path: Path, best: Mapping[str, object], draft: str | None, changes: Mapping[str, object]
) -> dict[str, object]:
    """Return the speculative configuration of the best option of a plan."""
    name, k = best.get("draft"), best.get("num_speculative_tokens")
    if not isinstance(k, int) or not isinstance(name, str | None):
        raise InvalidRequest(
            f"{path} is no plan: its best option lacks a draft or a K; give the output of forerun "
            "plan --json"
        )
    if name is None or k == 0:
        return {}
    if draft is None and name == UNNAMED_DRAFT:
        raise InvalidRequest(f"{path} does not name the draft that it is about: give --draft")
    return speculative_config(draft or name, k) | dict(changes)


class VllmProcess:
    """vLLM in a process of its own, on a free port of this machine.

    Attributes:
        address: where it answers once it is ready.
        failure: why it ended by itself, or was not ready in time; None before.
    """

    def __init__(self, process: subprocess.Popen[bytes], address: str, timeout_s: float) -> None:
        self.process = process
        self.address = address
        self.timeout_s = timeout_s
        self.failure: ServerUnavailable | None = None
        self._ready = threading.Event()
        self._is_stopping = False

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    def supervise(self, announce: Callable[[], None]) -> None:
        """Call `announce` once it is ready, and note why it ended, on a thread of its own."""
        threading.Thread(target=self._supervise, args=[announce], daemon=True).start()

    def _supervise(self, announce: Callable[[], None]) -> None:
        try:
            self.wait_until_ready()
            with suppress(OSError):  # the reader of the output is gone
                announce()
            code = self.process.wait()
            raise ServerUnavailable(f"vLLM ended with code {code}; its log is above")
        except ServerUnavailable as error:
            if not self._is_stopping:
                self.failure = error

    def wait_until_ready(self) -> None:
        """Wait until its health check succeeds; raises ServerUnavailable if it does not in time."""
        ends_s = time.monotonic() + self.timeout_s
        while time.monotonic() < ends_s:
            if (code := self.process.poll()) is not None:
                raise ServerUnavailable(f"vLLM ended with code {code} before it was ready")
            with suppress(InvalidRequest, UnreadableInput):
                fetch_page(f"{self.address}/health", PAGE)
                self._ready.set()
                return
            time.sleep(0.2)
        raise ServerUnavailable(
            f"vLLM was not ready after {self.timeout_s:.0f} s; its log is above"
        )

    def stop(self) -> None:
        """End it, and what it has started."""
        self._is_stopping = True
        with _defer_signals():
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT_S)
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def _defer_signals() -> Iterator[None]:
    """Let signals wait for the end of the block, so that no handler interrupts it."""
    waiting: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():  # where handlers run
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            before[number] = signal.signal(number, lambda number, _: waiting.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for waiting_number in waiting:
            signal.raise_signal(waiting_number)


@contextmanager
def vllm_running(
    target: str,
    speculative: Mapping[str, object],
    *,
    program: str = "vllm",
    arguments: Sequence[str] = (),
    timeout_s: float = START_TIMEOUT_S,
) -> Iterator[VllmProcess]:
    """Start vLLM and yield it before it is ready; it is ended with the block.

    `arguments` are further options of `vllm serve`. Raises InvalidRequest without such a program.
    """
    found = shutil.which(program)
    if found is None:
        raise InvalidRequest(f"there is no program {program!r}: install vLLM, or give --vllm PATH")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [found, "serve", target, "--host", "127.0.0.1", "--port", str(port)]
    if speculative:
        command += ["--speculative-config", json.dumps(dict(speculative))]
    vllm = None
    try:
        with _defer_signals():
            # In a session of its own, so that a key press in the terminal reaches it through us.
            process = subprocess.Popen([*command, *arguments], start_new_session=True)
            vllm = VllmProcess(process, f"http://127.0.0.1:{port}", timeout_s)
        yield vllm
    finally:
        if vllm is not None:
            vllm.stop()


def fetch(address: str, path: str) -> bytes:
    """Return what vLLM answers at a path; raises ServerUnavailable if it does not answer."""
    try:
        return fetch_page(address + path, PAGE)
    except UnreadableInput as error:
        raise ServerUnavailable(f"vLLM does not answer: {error}") from error


def create_proxy(
    address: str,
    view: LiveSource,
    *,
    config: ServerConfig | None = None,
    keys: Sequence[ApiKey] = (),
    is_ready: Callable[[], bool] = lambda: True,
) -> FastAPI:
    """Return an application that passes requests on to vLLM and shows a view on the live page.

    Without `keys` none is needed. Until `is_ready`, only the page and the health check answer.
    """
    config = config or ServerConfig()
    forwarder = Forwarder(address)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await forwarder.close()

    app = FastAPI(title="forerun", lifespan=lifespan, docs_url=None, redoc_url=None)
    protect(app, config, keys, _ignore_status)

    app.include_router(page_router(view))
    app.add_exception_handler(ServerUnavailable, _unavailable)
    for kind in (ForerunError, HTTPException):
        app.add_exception_handler(kind, response_for)

    _add_probes(app, partial(fetch, address), is_ready)

    @app.api_route("/{path:path}", methods=["GET", "POST"], include_in_schema=False)
    async def pass_on(path: str, request: Request) -> Response:
        body, key = await request.body(), request.state.key
        if not is_ready():
            raise ServerUnavailable(LOADING)
        if request.method == "POST" and key.sha256 is not None:
            await run_in_threadpool(check_limits, key, request.scope["path"], body)
        try:
            reply = await while_connected(request.receive, _forward(forwarder, request, body))
        except Disconnected:
            return Response(status_code=CLIENT_LEFT)
        except ServerUnavailable as error:
            raise ServerUnavailable(f"vLLM does not answer: {error}") from error
        return PassedResponse(reply, config.write_timeout_s)

    return app


LOADING = "vLLM is loading the model; /ready answers with status 200 when it has"


async def _unavailable(request: Request, error: Exception) -> Response:
    return error_response(str(error), 503, headers={"Retry-After": "5"})


def _add_probes(app: FastAPI, get: Callable[[str], bytes], is_ready: Callable[[], bool]) -> None:
    """Add /health, which a server that loads passes, and /ready, which it does not."""

    @app.get("/health", include_in_schema=False)
    def health() -> dict[str, str]:
        if not is_ready():
            return {"status": "loading"}
        get("/health")
        return {"status": "ok"}

    @app.get("/ready", include_in_schema=False)
    def ready() -> dict[str, str]:
        if not is_ready():
            raise ServerUnavailable(LOADING)
        return health()


DEFAULT_MAX_TOKENS: Mapping[str, int | None] = MappingProxyType(
    {
        "/v1/completions": 16,
        "/v1/chat/completions": None,
        "/v1/responses": None,
        "/v1/messages": None,
    }
)
"""Routes of vLLM that generate text, with what it takes where a body has no limit of tokens; None:
the rest of the context."""
WITHOUT_OUTPUT = frozenset(
    {"/tokenize", "/detokenize", "/v1/embeddings", "/pooling", "/classify", "/score", "/rerank"}
)
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def check_limits(key: ApiKey, path: str, content: bytes) -> None:
    """Refuse a request to vLLM that exceeds the limits of its key; raises InvalidRequest.

    vLLM converts numbers that are written as texts; they are refused here, so that what is checked
    is what vLLM uses. `path` is decoded, as vLLM reads it.
    """
    if path in WITHOUT_OUTPUT:
        return
    if path not in DEFAULT_MAX_TOKENS:
        raise InvalidRequest(
            f"a request with a key cannot use {path!r:.200}, whose output forerun does not know to "
            f"limit; there are {', '.join(DEFAULT_MAX_TOKENS)}"
        )
    body = parsed(content)
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    for name in ("priority", "n", "best_of", *LENGTHS):
        if body.get(name) is not None and type(body[name]) is not int:
            raise InvalidRequest(f"{name} is {body[name]!r:.200}; it must be an integer")
    lengths = [body[name] for name in LENGTHS if body.get(name) is not None]
    default = None if "max_tokens" in body else DEFAULT_MAX_TOKENS[path]
    num_prompts = max(1, sum(_num_prompts(body.get(name)) for name in ("prompt", "prompt_embeds")))
    num_choices = num_prompts * max(1, body.get("n") or 1, body.get("best_of") or 1)
    key.check(body.get("priority") or 0, num_choices, max(lengths, default=default))


def _num_prompts(prompt: object) -> int:
    """Return the number of prompts in a field of a completion: one for a list of token ids."""
    if not isinstance(prompt, list) or not prompt:
        return int(bool(prompt))
    return 1 if type(prompt[0]) is int else len(prompt)


async def _forward(forwarder: Forwarder, request: Request, body: bytes) -> PassedReply:
    """Forward a request to vLLM without retries; the key and the origin are not passed on."""
    query = b"?" + request.scope["query_string"] if request.scope["query_string"] else b""
    kept = [(name, value) for name, value in request.headers.items() if name not in _HOP_HEADERS]
    return await forwarder.send(request.method, request.scope["raw_path"] + query, kept, body)


class PassedResponse(Response):
    """The response of vLLM, until the client leaves or does not read for `write_timeout_s`."""

    def __init__(self, reply: PassedReply, write_timeout_s: float) -> None:
        super().__init__(status_code=reply.status)
        self.raw_headers = [
            (name.lower(), value)
            for name, value in reply.headers
            if (text := name.decode("latin-1").lower()) not in _HOP_HEADERS
            and not text.startswith("access-control-")  # origins are decided here
        ]
        self.reply = reply
        self.write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send what comes; without an end, which closes the connection, where vLLM breaks off."""
        try:
            await while_connected(receive, self._send(send))
        except Disconnected:
            return
        except ServerUnavailable as error:
            logger.warning("vLLM broke off an answer: %s", error)
        finally:
            await self.reply.close()

    async def _send(self, send: Send) -> None:
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        async for piece in self.reply.pieces():
            await self._write(send, piece, more_body=True)
        await self._write(send, b"", more_body=False)

    async def _write(self, send: Send, piece: bytes, *, more_body: bool) -> None:
        try:
            async with asyncio.timeout(self.write_timeout_s):
                await send({"type": "http.response.body", "body": piece, "more_body": more_body})
        except TimeoutError as error:
            raise Disconnected from error


def _ignore_status(status: int) -> None:
    """Do nothing: vLLM counts its own responses."""
