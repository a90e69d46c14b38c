"""Reads a live /metrics page twice and uses the difference.

The address given is the only one contacted: no redirect is followed, no proxy asked. Size and time
of an answer are bounded.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from forerun.bounded_http import http_request
from forerun.bounded_read import ReadLimits
from forerun.diagnose.evidence import Evidence, Reading
from forerun.diagnose.readers.prometheus import Metrics, PrometheusText, metrics_of
from forerun.errors import InvalidRequest, UnreadableInput

__all__ = ["MAX_PAGE_BYTES", "read_live"]

MAX_PAGE_BYTES = 1 << 25
TIMEOUT_S = 10.0
MAX_INTERVAL_S = 600.0


def read_live(
    url: str, *, interval_s: float, sleep: Callable[[float], None] = time.sleep
) -> Evidence:
    """Return the evidence of two samples, or of the totals where nothing happened in between.

    Args:
        url: of a Prometheus exposition.
        interval_s: between the samples.
        sleep: waits; an argument so that nothing has to.

    Raises:
        InvalidRequest: it cannot be read, takes too long, or is no exposition of a known engine.
    """
    if not 0.0 < interval_s <= MAX_INTERVAL_S:
        raise InvalidRequest(f"--interval-s is {interval_s}; it must be above 0, at most 600")
    first = page_of(url)
    started = time.monotonic()
    sleep(interval_s)
    second = page_of(url)
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
    """Add the tokens of all requests per second, where the engine reports no better figure."""
    for name in TOKENS:
        tokens = second.totals.get(name, 0.0) - first.totals.get(name, 0.0)
        if tokens > 0.0 and seconds > 0.0 and "tokens_per_s" not in evidence:
            evidence.conclude("tokens_per_s", tokens / seconds, source)


def page_of(url: str) -> PrometheusText:
    """Read the page once.

    Raises:
        InvalidRequest: as for `read_live`.
    """
    try:
        answer = http_request(
            url, limits=ReadLimits(max_bytes=MAX_PAGE_BYTES, max_seconds=TIMEOUT_S)
        )
    except UnreadableInput as error:
        raise InvalidRequest(str(error)) from error
    if 300 <= answer.status < 400:
        where = answer.headers.get("location", "elsewhere")
        raise InvalidRequest(
            f"{url} redirects to {where}, which is not followed: give that address"
        )
    if answer.status != 200:
        raise InvalidRequest(f"{url} answers {answer.status}: {answer.reason}")
    page = PrometheusText()
    for line in answer.body.decode("utf-8", errors="replace").splitlines():
        page.read(line)
    page.close()
    return page
