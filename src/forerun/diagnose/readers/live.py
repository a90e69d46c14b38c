"""A live /metrics page, sampled twice: what happened in between.

The address given is the only one contacted: no redirect is followed, no proxy asked. Size and time
of an answer are bounded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from http.client import HTTPException, HTTPMessage
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

from forerun.diagnose.evidence import Evidence, Reading
from forerun.diagnose.readers.prometheus import Metrics, PrometheusText, metrics_of
from forerun.errors import InvalidRequest

__all__ = ["MAX_PAGE_BYTES", "read_live"]

MAX_PAGE_BYTES = 1 << 25
TIMEOUT_S = 10.0
CHUNK_BYTES = 1 << 16
MAX_INTERVAL_S = 600.0


class NoRedirect(HTTPRedirectHandler):
    """A page that sends elsewhere is an error, whatever it sends to."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """Refuse."""
        raise HTTPError(
            req.full_url, code, "redirects elsewhere, which is not followed", headers, fp
        )


def read_live(
    url: str, *, interval_s: float, sleep: Callable[[float], None] = time.sleep
) -> Evidence:
    """Evidence of two samples; of their totals since the start where nothing happened in between.

    Args:
        url: of a Prometheus exposition.
        interval_s: between the samples.
        sleep: waits; an argument so that nothing has to.

    Raises:
        InvalidRequest: it cannot be read, takes too long, or is no exposition of a known engine.
    """
    if not 0.0 < interval_s <= MAX_INTERVAL_S:
        raise InvalidRequest(f"--interval-s is {interval_s}; it must be above 0, at most 600")
    opener = build_opener(ProxyHandler({}), NoRedirect)
    first = page_of(opener, url)
    started = time.monotonic()
    sleep(interval_s)
    second = page_of(opener, url)
    seconds = time.monotonic() - started
    between = second.metrics.since(first.metrics)
    evidence = Evidence(readings=[Reading(source=url, kinds={second.kind}, num_lines=2)])
    reading = evidence.readings[0]
    if between.totals == second.metrics.totals or any(metrics_of(between).counts.values()):
        source = f"{url}: {seconds:.0f} s between two samples"
    else:
        reading.notes.append("nothing was counted between the samples; totals since the start")
        between, source = second.metrics, f"{url}: totals since the start"
    tally = metrics_of(between)
    if tally.is_empty:
        raise InvalidRequest(f"{url} holds no metric of an engine that is known")
    tally.add_to(evidence, source)
    add_rate(evidence, first.metrics, second.metrics, seconds, source)
    return evidence


TOKENS = ("vllm:generation_tokens", "sglang:generation_tokens", "llamacpp:tokens_predicted")


def add_rate(
    evidence: Evidence, first: Metrics, second: Metrics, seconds: float, source: str
) -> None:
    """Tokens of all requests per second in between, where the engine says nothing better."""
    for name in TOKENS:
        tokens = second.totals.get(name, 0.0) - first.totals.get(name, 0.0)
        if tokens > 0.0 and seconds > 0.0 and "tokens_per_s" not in evidence:
            evidence.add("tokens_per_s", tokens / seconds, source)


def page_of(opener: OpenerDirector, url: str) -> PrometheusText:
    """One sample.

    Raises:
        InvalidRequest: as for `read_live`.
    """
    page = PrometheusText()
    for line in fetched(opener, url).decode("utf-8", errors="replace").splitlines():
        page.read(line)
    page.close()
    return page


def fetched(opener: OpenerDirector, url: str) -> bytes:
    """The body, read in pieces so that neither size nor time run away."""
    deadline = time.monotonic() + TIMEOUT_S
    pieces: list[bytes] = []
    try:
        with opener.open(url, timeout=TIMEOUT_S) as answer:
            while piece := answer.read1(CHUNK_BYTES):
                pieces.append(piece)
                if sum(map(len, pieces)) > MAX_PAGE_BYTES:
                    raise InvalidRequest(f"{url} sends more than {MAX_PAGE_BYTES} bytes")
                if time.monotonic() > deadline:
                    raise InvalidRequest(f"{url} takes more than {TIMEOUT_S:g} s to answer")
    except HTTPError as error:
        raise InvalidRequest(f"{url} answers {error.code}: {error.msg}") from error
    except (URLError, HTTPException, OSError, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise InvalidRequest(f"{url} cannot be read: {reason}") from error
    return b"".join(pieces)
