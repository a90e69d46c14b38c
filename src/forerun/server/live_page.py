"""The live page of any engine: its files and routes, and its snapshots of what was counted.

A snapshot is what the page reads as JSON. Its durations are in seconds and its rates per second. An
age is counted back from the moment of the snapshot, so that a reader needs no clock in common with
the server. A figure that was not measured is null; it is never zero instead.

Nothing is loaded from other hosts, and the content policy allows no inline script, so that text of
a prompt or a model stays text even if the page had a defect.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from importlib.resources import files
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
from fastapi import APIRouter
from starlette.responses import Response

from forerun.server.live_figures import RECENT_S, WINDOW_S, LiveFigures
from forerun.theory.figures import DURATIONS, PlainComparison, Seconds
from forerun.trace.change_points import Incident

MAX_AGE_S = 0.5
"""Seconds for which a snapshot is reused for all open pages."""
DIAGNOSIS_INTERVAL_S = 15.0

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

Json = dict[str, Any]


@runtime_checkable
class Diagnose(Protocol):
    """Makes diagnoses of the server's page of metrics."""

    def __call__(self, page: str) -> Json | None:
        """Return the diagnosis of what was counted lately; None where there is nothing new."""

    def ask(self, page: str, given: Mapping[str, object]) -> Json:
        """Return what to ask a person next, and the diagnosis with the answers so far."""


class LivePage(ABC):
    """Makes the snapshots of the live page; `figures` are those of the latest steps."""

    def __init__(self, diagnose: Diagnose | None, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.figures = LiveFigures()
        self._started_s = clock()
        self._reading = threading.RLock()
        self._prefilled: deque[tuple[float, int]] = deque()
        self._diagnose = diagnose
        self._diagnosing = threading.Lock()
        self._diagnosis: Json | None = None
        self._diagnosed_s = -DIAGNOSIS_INTERVAL_S
        self._encoded, self._encoded_s = b"", -MAX_AGE_S

    @abstractmethod
    def drain(self) -> None:
        """Count the steps that were queued since the last call."""

    @abstractmethod
    def describe_engine(self, now_s: float) -> Json:
        """Return what the figures of the latest steps do not say: setup, load, requests."""

    @abstractmethod
    def read_metrics(self) -> str:
        """Return all metrics in Prometheus's text format."""

    @abstractmethod
    def read_changes(self) -> Iterable[Incident]:
        """Return the latest changes for the worse, the last one at the end."""

    def encoded(self) -> bytes:
        """Return a snapshot as JSON, at most one per `MAX_AGE_S` however many pages are open."""
        with self._reading:
            now_s = self.clock()
            if not self._encoded or now_s - self._encoded_s >= MAX_AGE_S:
                self._encoded, self._encoded_s = msgspec.json.encode(self.snapshot()), now_s
            return self._encoded

    def snapshot(self) -> Json:
        """Return what the page shows now; any thread but the engine's may call this."""
        with self._reading:
            self.drain()
            now_s = self.clock()
            return self._describe_figures(now_s) | self.describe_engine(now_s)

    def _describe_figures(self, now_s: float) -> Json:
        figures, changes = self.figures, [*self.read_changes()]
        counts, compared = figures.counts, figures.compare()
        pairs = zip(counts.drafted_per_position, counts.accepted_per_position, strict=True)
        return {
            "uptime_s": now_s - self._started_s,
            "window_s": float(min(WINDOW_S, len(figures.groups))),
            "tokens_per_s": figures.tokens_per_s(now_s),
            "speedup": describe_speedup(compared),
            "acceptance_length": counts.acceptance_length,
            "positions": [
                {"position": position, "num_drafted": drafted, "num_accepted": accepted}
                for position, (drafted, accepted) in enumerate(pairs, start=1)
            ],
            "token_times": _divide_times(compared.seconds),
            "history": figures.points(now_s),
            "diagnosis": self._diagnosis,
            "diagnosis_age_s": None if self._diagnosis is None else now_s - self._diagnosed_s,
            "last_change": changes[-1].words if changes else None,
            "last_change_age_s": time.time() - changes[-1].noticed_s if changes else None,
        }

    def describe_latency(
        self,
        now_s: float,
        first_tokens: Collection[float],
        gaps: Collection[float],
        prefix: tuple[int, int],
        num_prompt_rows: int,
    ) -> Json:
        """Return quantiles of times in seconds, and rates.

        Args:
            prefix: prompt tokens found in the KV cache, and those looked for.
            num_prompt_rows: prompt tokens fed since the start.
        """
        fed, (hits, queries) = self._prefilled, prefix
        fed.append((now_s, num_prompt_rows))
        while len(fed) > 2 and fed[1][0] <= now_s - RECENT_S:
            fed.popleft()
        (since_s, before), (_, now) = fed[0], fed[-1]
        return {
            "ttft": _compute_quantiles(first_tokens),
            "prefix_hit_share": hits / queries if queries else None,
            "gap": _compute_quantiles(gaps),
            "prompt_tokens_per_s": (now - before) / (now_s - since_s) if now_s > since_s else None,
        }

    def diagnose(self) -> None:
        """Diagnose the latest metrics, if there are new steps and the last diagnosis is old enough.

        It takes some ten milliseconds; call it on a thread on which the engine does not wait.
        """
        if self._diagnose is None or not self._diagnosing.acquire(blocking=False):
            return
        try:
            now_s = self.clock()
            if now_s - self._diagnosed_s < DIAGNOSIS_INTERVAL_S:
                return
            found = self._diagnose(self.read_metrics())
            if found is not None:
                self._diagnosed_s = now_s
                self._diagnosis = found
        finally:
            self._diagnosing.release()

    def ask(self, answers: Mapping[str, object]) -> bytes:
        """Return the next question about this server and what follows from the answers, as JSON.

        It takes up to a second; call it on a thread on which nothing waits.
        """
        assert self._diagnose is not None
        return msgspec.json.encode(self._diagnose.ask(self.read_metrics(), answers))


def _compute_quantiles(values: Collection[float]) -> Json | None:
    if not values:
        return None
    p50, p95 = np.quantile([*values], (0.5, 0.95)).tolist()
    return {"p50": p50, "p95": p95, "num": len(values)}


def describe_speedup(compared: PlainComparison) -> Json | None:
    """Return a speedup with its interval; None before it is known."""
    if compared.speedup is None:
        return None
    shown = {name: getattr(compared, name) for name in ("plain_token_s", "share_compared")}
    return asdict(compared.speedup) | shown


def _divide_times(times: Seconds) -> Json | None:
    """Return the time per token of steps by its parts; None without a step."""
    if not times.num_tokens:
        return None
    return {name: getattr(times, name) / times.num_tokens for name in DURATIONS}


def page_router(view: LivePage) -> APIRouter:
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
        view.diagnose()  # at once: the one before may be of long ago
        return Response(
            view.encoded(),
            media_type="application/json",
            headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"},
        )

    return router
