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
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from fastapi import FastAPI, Request, Response
from msgspec.structs import replace
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from forerun.bounded_read import ReadLimits, parse_json, read_bytes
from forerun.client.door import Forwarder, PassedReply, fetch_page
from forerun.doctor.diagnosis import diagnose
from forerun.doctor.evidence import Evidence, Reading
from forerun.doctor.readers.prometheus import Metrics, metrics_of, read_page
from forerun.drafters.config import parse_drafter
from forerun.errors import ForerunError, InvalidRequest, ServerUnavailable, UnreadableInput
from forerun.models.catalog import PREFIX, zoo_path
from forerun.server.app import Disconnected, while_connected
from forerun.server.bodies import parsed
from forerun.server.config import ServerConfig
from forerun.server.errors import error_response, response_for
from forerun.server.guard import ApiKey, protect
from forerun.server.live import live_diagnosis
from forerun.server.live_page import (
    LiveDiagnosis,
    LiveLoad,
    LivePoint,
    LivePosition,
    LiveSetup,
    LiveSnapshot,
    LiveTotals,
    page_router,
)
from forerun.server.request_log import CLIENT_LEFT

_PREFIX = "vllm:spec_decode_num_"
HISTORY = 120
"""Samples that are kept; an open page makes about one a second."""
RECENT_S = 10.0
DIAGNOSIS_INTERVAL_S = 15.0
MIN_DRAFTS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSample:
    """Metrics of a server at one point in time."""

    at_s: float
    metrics: Metrics

    def total(self, name: str) -> float:
        """Return a metric summed over its labels; 0 where the server does not have it."""
        return self.metrics.totals.get(name, 0.0)


class VllmView:
    """Snapshots of a vLLM server for the live page, without figures of single steps.

    `get` returns the body at a path of the server, or raises ServerUnavailable.
    """

    def __init__(
        self,
        get: Callable[[str], bytes],
        *,
        target: str,
        methods: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.get = get
        self.clock = clock
        self._setup = LiveSetup(
            engine="vllm", version="", target=target, methods=tuple(methods), max_context=None
        )
        self._started_s = clock()
        self._samples: deque[MetricsSample] = deque(maxlen=HISTORY)
        self._diagnosis: LiveDiagnosis | None = None
        self._diagnosed_s = -DIAGNOSIS_INTERVAL_S

    def snapshot(self) -> LiveSnapshot:
        """Read the metrics once and return a snapshot; an unreachable server adds no sample."""
        self._sample()
        now_s = self.clock()
        samples = list(self._samples) or [MetricsSample(at_s=now_s, metrics=Metrics())]
        latest, growth = samples[-1], _grown_in(samples)
        recent = [sample for sample in samples if sample.at_s >= now_s - RECENT_S]
        drafts = growth.totals.get(_PREFIX + "drafts", 0.0)
        accepted = growth.totals.get(_PREFIX + "accepted_tokens", 0.0)
        return LiveSnapshot(
            uptime_s=now_s - self._started_s,
            window_s=latest.at_s - samples[0].at_s,
            setup=self._setup,
            totals=LiveTotals(
                num_steps=int(latest.total(_PREFIX + "drafts")),
                num_drafted=int(latest.total(_PREFIX + "draft_tokens")),
                num_accepted=int(latest.total(_PREFIX + "accepted_tokens")),
                num_emitted=int(latest.total("vllm:generation_tokens")),
            ),
            load=LiveLoad(
                num_running=int(latest.total("vllm:num_requests_running")),
                num_waiting=int(latest.total("vllm:num_requests_waiting")),
                kv_share=latest.metrics.totals.get("vllm:kv_cache_usage_perc"),
            ),
            tokens_per_s=rate_of(recent),
            acceptance_length=1.0 + accepted / drafts if drafts else None,
            positions=positions_of(growth),
            history=tuple(
                _point_of(before, after, now_s, self._setup.methods)
                for before, after in pairwise(samples)
                if after.total("vllm:generation_tokens") > before.total("vllm:generation_tokens")
            ),
            diagnosis=self._diagnosis,
        )

    def _sample(self) -> None:
        try:
            body = self.get("/metrics")
        except (InvalidRequest, ServerUnavailable):
            return
        page = read_page(body.decode(errors="replace"))
        if not self._samples:
            self._setup = replace(self._setup, version=_version(self.get))
        self._samples.append(MetricsSample(at_s=self.clock(), metrics=page.metrics))

    def diagnose(self) -> None:
        """Diagnose the counts since the first stored sample if the last diagnosis is old enough."""
        samples = list(self._samples)
        if not samples or self.clock() - self._diagnosed_s < DIAGNOSIS_INTERVAL_S:
            return
        growth = _grown_in(samples)
        drafts = int(growth.totals.get(_PREFIX + "drafts", 0.0))
        if drafts < MIN_DRAFTS:
            return
        self._diagnosed_s = self.clock()
        evidence = Evidence(readings=[Reading(source="metrics of vLLM", kinds={"vllm"})])
        metrics_of(growth).add_to(evidence, "metrics of vLLM")
        self._diagnosis = live_diagnosis(diagnose(evidence), drafts)


def _grown_in(samples: Sequence[MetricsSample]) -> Metrics:
    return samples[-1].metrics.since(samples[0].metrics)


def rate_of(samples: Sequence[MetricsSample]) -> float:
    """Return output tokens per second between the first and the last sample."""
    if len(samples) < 2:
        return 0.0
    tokens = _grown_in(samples).totals.get("vllm:generation_tokens", 0.0)
    return tokens / max(1e-3, samples[-1].at_s - samples[0].at_s)


def positions_of(growth: Metrics) -> tuple[LivePosition, ...]:
    """Return acceptance by position from counters of vLLM, which always drafts K tokens."""
    drafts = int(growth.totals.get(_PREFIX + "drafts", 0.0))
    counts = growth.positions.get(_PREFIX + "accepted_tokens_per_pos", {})
    return tuple(
        LivePosition(position=index + 1, num_drafted=drafts, num_accepted=int(count))
        for index, count in sorted(counts.items())
        if drafts
    )


def _point_of(
    before: MetricsSample, after: MetricsSample, now_s: float, methods: Sequence[str]
) -> LivePoint:
    """Return the figures of the time between two samples."""
    growth = after.metrics.since(before.metrics)
    drafts = growth.totals.get(_PREFIX + "drafts", 0.0)
    accepted = growth.totals.get(_PREFIX + "accepted_tokens", 0.0)
    method = methods[0] if methods and drafts else "plain"
    return LivePoint(
        age_s=max(0.0, now_s - before.at_s),
        tokens_per_s=rate_of((before, after)),
        num_running=after.total("vllm:num_requests_running"),
        acceptance_length=1.0 + accepted / drafts if drafts else None,
        num_speculative_tokens=growth.totals.get(_PREFIX + "draft_tokens", 0.0) / max(1.0, drafts),
        methods={method: max(1, int(drafts))},
    )


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
    if best.get("tree") is not None:
        raise InvalidRequest(
            f"{path} recommends a tree, and vLLM drafts chains: plan without --sibling-acceptance"
        )
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


def create_proxy(
    address: str,
    *,
    target: str,
    methods: Sequence[str],
    config: ServerConfig | None = None,
    keys: Sequence[ApiKey] = (),
    is_ready: Callable[[], bool] = lambda: True,
) -> FastAPI:
    """Return an application that passes requests on to vLLM and shows its metrics on the live page.

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

    def get(path: str) -> bytes:
        try:
            return fetch_page(address + path, PAGE)
        except UnreadableInput as error:
            raise ServerUnavailable(f"vLLM does not answer: {error}") from error

    app.include_router(page_router(VllmView(get, target=target, methods=methods)))
    app.add_exception_handler(ServerUnavailable, _unavailable)
    for kind in (ForerunError, HTTPException):
        app.add_exception_handler(kind, response_for)

    _add_probes(app, get, is_ready)

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


def _version(get: Callable[[str], bytes]) -> str:
    """Return the version that a vLLM server reports; empty if it reports none."""
    try:
        return str(parse_json(get("/version"), "the version")["version"])
    except (ForerunError, KeyError, TypeError):
        return ""


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
