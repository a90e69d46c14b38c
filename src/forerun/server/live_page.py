"""The live page: its static files, and the snapshots that it requests as JSON.

All durations are in seconds and all rates per second. An age is counted back from the moment of
the snapshot, so that a reader needs no clock in common with the server. A figure that was not
measured is null; it is never zero instead. Nothing is loaded from other hosts, and the content
policy allows no inline script, so that text of a prompt or a model stays text even if the page had
a defect.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec
from fastapi import APIRouter
from starlette.background import BackgroundTask
from starlette.responses import Response

Origin = Literal["prompt", "accepted", "recovered", "bonus", "plain"]
"""Origin of a token; "plain" is that of a token from a step without a draft."""


class LiveSpeedup(msgspec.Struct, frozen=True, kw_only=True):
    """The one speedup that the page states, with its 95% interval.

    It is the time that plain steps would take for the tokens of the latest decode steps, over the
    time that these steps took. Steps that read prompts are left out, and so are batch sizes at
    which no plain steps were measured.

    Attributes:
        share_compared: of the tokens, the share of the batch sizes that are compared.
        num_plain_steps: plain steps that were measured since the start.
    """

    value: float
    low: float
    high: float
    plain_s: float
    share_compared: float
    num_plain_steps: int


class LiveTokenTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Time per token of the latest decode steps; steps that read prompts are left out.

    `verify_s` is the target pass; `other_s` everything else, verification included.
    """

    num_steps: int
    num_sequences: float
    draft_s: float
    verify_s: float
    other_s: float


class LiveQuantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Median and 95th percentile in seconds, with the number of values."""

    p50: float
    p95: float
    num: int


class LiveLatency(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the latest requests, and how many of their prompt tokens were read or cached.

    Attributes:
        gap: from one output of a request to its next; an output is what a step emits.
        prefix_hit_share: of the latest prompts' tokens, the share found in the KV cache.
    """

    ttft: LiveQuantiles | None = None
    gap: LiveQuantiles | None = None
    prompt_tokens_per_s: float | None = None
    prefix_hit_share: float | None = None


class LiveSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Models, drafters and settings of the engine that the server runs.

    Attributes:
        methods: names of the drafters; empty where decoding is plain.
        max_context: prompt plus output tokens of one sequence.
        has_chat: whether conversations can be rendered; None where it is not known.
    """

    engine: str
    version: str
    target: str
    methods: tuple[str, ...]
    max_context: int | None
    has_chat: bool | None = None


class LiveTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the server was started: target passes, draft nodes, accepted nodes, tokens."""

    num_steps: int
    num_drafted: int
    num_accepted: int
    num_emitted: int


class LiveLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences and KV in use at the moment of the snapshot, with their limits if known.

    Attributes:
        refused: responses with an error by status, since the start.
    """

    num_running: int
    num_waiting: int
    max_running: int | None = None
    max_waiting: int | None = None
    num_kv_tokens: int | None = None
    max_kv_tokens: int | None = None
    kv_share: float | None = None
    refused: dict[str, int] | None = None


class LivePosition(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one draft position: steps that drafted it, and steps that accepted through it."""

    position: int
    num_drafted: int
    num_accepted: int


class LivePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one second in which tokens were emitted.

    Attributes:
        age_s: how long ago the second began.
        num_running: mean sequences per step.
        num_speculative_tokens: mean K of the plans, plain ones counted as 0.
    """

    age_s: float
    tokens_per_s: float
    num_running: float
    acceptance_length: float | None
    num_speculative_tokens: float | None
    methods: dict[str, int]


class LivePiece(msgspec.Struct, frozen=True, kw_only=True):
    """Text of consecutive tokens that have the same source."""

    text: str
    origin: Origin


class LiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One of the latest requests.

    Attributes:
        state: "reading" its prompt, "decoding", or the reason of its end.
        acceptance_length: tau over its steps; None before the first.
        tokens_per_s: after the first token.
        head: the beginning of the prompt; empty where texts are not shown.
        pieces: the end of the prompt and the output by origin; empty where texts are not shown.
    """

    request_id: str
    state: str
    age_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_drafted: int
    acceptance_length: float | None
    draft_acceptance_rate: float | None
    ttft_s: float | None
    tokens_per_s: float | None
    head: str
    pieces: tuple[LivePiece, ...]


class LiveCause(msgspec.Struct, frozen=True, kw_only=True):
    """A likely cause of slow decoding, with its score and an explanation."""

    label: str
    score: float
    what: str


class LiveDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `forerun diagnose` over the latest steps.

    Attributes:
        num_steps: steps of requests that it rests on.
    """

    verdict: str
    headline: str
    causes: tuple[LiveCause, ...]
    changes: tuple[str, ...]
    num_steps: int


class LiveSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the live page shows.

    Attributes:
        uptime_s: since the view was made.
        window_s: seconds with activity that the figures below cover.
        tokens_per_s: emitted per second over the last ten seconds; 0 where nothing ran.
        speedup: None before enough plain steps were measured.
        acceptance_length: tau of the drafting steps.
        token_times: None before the first decode step.
        shows_texts: whether requests carry their text.
        diagnosis: None before there were enough steps.
        last_change: the latest change point of acceptance, in words; None before the first.
        last_change_age_s: seconds since it was noticed.
    """

    uptime_s: float
    window_s: float
    setup: LiveSetup
    totals: LiveTotals
    load: LiveLoad
    tokens_per_s: float
    acceptance_length: float | None
    positions: tuple[LivePosition, ...]
    history: tuple[LivePoint, ...]
    diagnosis: LiveDiagnosis | None
    speedup: LiveSpeedup | None = None
    token_times: LiveTokenTimes | None = None
    latency: LiveLatency = LiveLatency()
    requests: tuple[LiveRequest, ...] = ()
    shows_texts: bool = False
    last_change: str | None = None
    last_change_age_s: float | None = None
    schema_version: int = 2


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
"""Seconds for which a snapshot is reused for all open pages."""


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
    """Return the routes `/`, `/page/...` and `/live`."""
    router = APIRouter()
    snapshots = EncodedSnapshots(source)
    folder = files("forerun.server") / "page"
    contents = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}

    @router.get("/", include_in_schema=False)
    async def index() -> Response:
        return await file("index.html")

    @router.get("/page/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        media_type = MEDIA_TYPES.get("." + name.rpartition(".")[2])
        if name not in contents or media_type is None:
            return Response("no such file", status_code=404)
        return Response(contents[name], media_type=media_type, headers=SECURITY)

    @router.get("/live", dependencies=list(dependencies), summary="What the server does now")
    def live() -> Response:
        return Response(
            snapshots.body(),
            media_type="application/json",
            headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"},
            background=BackgroundTask(source.diagnose),
        )

    return router
