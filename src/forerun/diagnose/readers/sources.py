"""Reads evidence from a named source: a trace, a text file, standard input or a URL."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from forerun.bounded_read import BoundedFile, ReadLimits, open_bounded, open_stdin
from forerun.diagnose.evidence import Evidence, Reading
from forerun.diagnose.readers.prometheus import Metrics, PrometheusText, metrics_of
from forerun.errors import InvalidRequest, UnreadableInput

__all__ = ["as_reference", "read_live", "read_source"]

MAX_PAGE_BYTES = 1 << 25
TIMEOUT_S = 10.0
MAX_INTERVAL_S = 600.0


def read_live(
    url: str, *, interval_s: float, sleep: Callable[[float], None] = time.sleep
) -> Evidence:
    """Return evidence from two samples of a server, or from its totals if the server was idle.

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
    """Add the throughput of all requests, if the engine reports no better figure."""
    for name in TOKENS:
        tokens = second.totals.get(name, 0.0) - first.totals.get(name, 0.0)
        if tokens > 0.0 and seconds > 0.0 and "tokens_per_s" not in evidence:
            evidence.add_or_note("tokens_per_s", tokens / seconds, source)


def page_of(url: str) -> PrometheusText:
    """Fetch the metrics page once.

    Raises:
        InvalidRequest: as for `read_live`.
    """
    from forerun.bounded_http import http_request  # with the HTTP client, for URLs only

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


REFERENCE = {
    "alpha": "reference_alpha",
    "k": "reference_k",
    "speedup": "reference_speedup",
    "acceptance_length": "reference_acceptance_length",
    "draft_acceptance_rate": "reference_acceptance_rate",
    "tokens_per_s": "tokens_per_s_before",
}
"""What a figure of an earlier or other run is called beside today's."""
TRACE_START = b'{"record":'
LIMITS = ReadLimits(max_bytes=1 << 32, max_seconds=600.0)
"""Of a source. A log is read from a pipe for as long as its server runs, hence the minutes."""
FIRST_DATA_S = 20.0
"""How long a named pipe may take until its writer has written anything."""


def read_source(name: str, *, interval_s: float) -> Evidence:
    """Return the evidence of one source.

    Args:
        name: a path, - for stdin, or an http(s) URL.
        interval_s: between the two samples of a URL.

    Raises:
        InvalidRequest: it cannot be read, or nothing in it is understood.
    """
    if name.startswith(("http://", "https://")):
        return read_live(name, interval_s=interval_s)
    try:
        if name == "-":
            with open_stdin(LIMITS) as stream:
                return read_stream(stream, "stdin")
        path = Path(name)
        if path.is_dir():
            return read_trace(path)
        with open_bounded(path, LIMITS, name=path.name) as file:
            file.wait_for_data(FIRST_DATA_S)
            if file.peek(len(TRACE_START)) == TRACE_START and path.is_file():
                return read_trace(path)
            return read_stream(file, path.name)
    except OSError as error:
        raise InvalidRequest(f"{name[:300]} cannot be read: {error.strerror or error}") from error
    except UnreadableInput as error:
        raise InvalidRequest(str(error)) from error


def read_trace(path: Path) -> Evidence:
    """Return the evidence of a forerun trace; pyarrow is imported for traces only."""
    from forerun.diagnose.readers.trace.reader import read_trace_evidence

    return read_trace_evidence(path)


def read_stream(file: BoundedFile, name: str) -> Evidence:
    """Return the evidence of a stream; a trace is copied into a file first."""
    if file.peek(len(TRACE_START)) != TRACE_START:
        from forerun.diagnose.readers.text import read_text

        return read_text(file, name)
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        with path.open("wb") as copy:
            while chunk := file.read():
                copy.write(chunk)
        return read_trace(path)


def as_reference(evidence: Evidence) -> Evidence:
    """Rename the figures of a run to those of the reference run for a comparison."""
    from forerun.diagnose.rates import add_costs, add_rates

    add_rates(evidence)
    add_costs(evidence)
    found = Evidence(readings=evidence.readings)
    for name, reference in REFERENCE.items():
        fact = evidence.facts.get(name)
        if fact is not None:
            found.add(reference, fact.value, f"before: {fact.source}", fact.interval)
    return found
