"""Reads evidence from a named source: a trace, a text file, standard input or a URL."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from forerun.bounded_read import (
    BoundedFile,
    Deadline,
    ReadLimits,
    gunzipped,
    open_bounded,
    open_stdin,
)
from forerun.diagnose.evidence import FOLDER, Evidence, Reading
from forerun.diagnose.readers.prometheus import PrometheusText, metrics_of
from forerun.errors import InvalidRequest, UnreadableInput

if TYPE_CHECKING:
    import httpx

MAX_PAGE_BYTES = 1 << 25
TIMEOUT_S = 10.0
MAX_INTERVAL_S = 600.0


def read_live(
    url: str, *, interval_s: float, sleep: Callable[[float], None] = time.sleep
) -> Evidence:
    """Return evidence from two samples of a server, or from its totals if the server was idle."""
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
    evidence.add("engine", second.kind.split()[0], url)
    tally = metrics_of(between)
    if tally.is_empty:
        raise InvalidRequest(f"{url} holds no metric of an engine that is known")
    tally.add_to(evidence, source)
    for name in TOKENS:
        tokens = second.metrics.totals.get(name, 0.0) - first.metrics.totals.get(name, 0.0)
        if tokens > 0.0 and seconds > 0.0 and "tokens_per_s" not in evidence:
            evidence.note("tokens_per_s", tokens / seconds, source)
    return evidence


TOKENS = ("vllm:generation_tokens", "sglang:generation_tokens", "llamacpp:tokens_predicted")


def page_of(url: str) -> PrometheusText:
    """Read a live page of metrics once; raises InvalidRequest where it cannot be read."""
    try:
        body = http_get(url, ReadLimits(max_bytes=MAX_PAGE_BYTES, max_seconds=TIMEOUT_S))
    except UnreadableInput as error:
        raise InvalidRequest(str(error)) from error
    page = PrometheusText()
    for line in body.decode("utf-8", errors="replace").splitlines():
        page.read(line)
    page.close()
    return page


HEADER_BYTES = 1 << 16
"""Status lines, headers and trailers of one exchange, beside the body; httpx allows 100 KB."""


def http_get(url: str, limits: ReadLimits) -> bytes:
    """Return the decompressed body of a page, requested without proxies and redirects."""
    # Imported when needed: files are read without them.
    import ssl

    import httpx

    from forerun.client.connection import ReadClock, answer_deadline, limit_reads

    clock, deadline = ReadClock(), answer_deadline(limits.max_seconds, url)
    try:
        with httpx.Client(
            trust_env=False,
            verify=ssl.create_default_context(),
            timeout=limits.max_seconds,
            headers={"Accept-Encoding": "identity"},
        ) as client:
            limit_reads(client, clock)
            with (
                clock.until(deadline, limits.max_bytes + HEADER_BYTES),
                client.stream("GET", url) as answer,
            ):
                return _body_of(answer, url, limits, deadline)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise UnreadableInput(f"{url} cannot be read: {reason}") from error


def _body_of(answer: httpx.Response, url: str, limits: ReadLimits, deadline: Deadline) -> bytes:
    """Read the whole response and return its body; a redirect or an error is refused."""
    body = bytearray()
    for piece in answer.iter_raw():
        deadline.remaining_s()
        body += piece
        if len(body) > limits.max_bytes:
            raise UnreadableInput(f"{url} sends more than {limits.max_bytes} bytes, the limit here")
    if answer.is_redirect:
        where = answer.headers.get("location", "elsewhere")
        raise UnreadableInput(
            f"{url} redirects to {where}, which is not followed: give that address"
        )
    if answer.status_code != 200:
        raise UnreadableInput(f"{url} answers {answer.status_code}: {answer.reason_phrase}")
    is_packed = answer.headers.get("content-encoding", "").lower() in ("gzip", "x-gzip", "deflate")
    return gunzipped(bytes(body), url, limits) if is_packed else bytes(body)


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


def read_source(name: str, *, interval_s: float, is_asking: bool = False) -> Evidence:
    """Return the evidence of one source; a name with blanks that is no file is a complaint.

    Args:
        name: file, URL, "-" or words.
        interval_s: between two samples of a URL.
        is_asking: whether questions follow; a complaint that says nothing is then no error.
    """
    if name.startswith(("http://", "https://")):
        return read_live(name, interval_s=interval_s)
    try:
        if name == "-":
            with open_stdin(LIMITS) as stream:
                return _read_stream(stream, "stdin")
        path = Path(name)
        if " " in name.strip() and not os.path.lexists(path):
            return read_complaint(name, is_asking=is_asking)
        if path.is_dir():
            return read_trace(path)
        with open_bounded(path, LIMITS, name=path.name) as file:
            file.wait_for_data(FIRST_DATA_S)
            if file.peek(len(TRACE_START)) == TRACE_START and path.is_file():
                return read_trace(path)
            return _read_stream(file, path.name)
    except OSError as error:
        raise InvalidRequest(f"{name[:300]} cannot be read: {error.strerror or error}") from error
    except UnreadableInput as error:
        raise InvalidRequest(str(error)) from error


def read_trace(path: Path) -> Evidence:
    """Return the evidence of a forerun trace; pyarrow is imported for traces only."""
    from forerun.diagnose.readers.trace import read_trace_evidence

    return read_trace_evidence(path)


def _read_stream(file: BoundedFile, name: str) -> Evidence:
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


Rule = tuple[tuple[str, ...], tuple[re.Pattern[str], ...]]
MAX_COMPLAINT = 4000
"""Characters; the patterns take time in proportion to the length of a sentence."""
SENTENCES = re.compile(r"[.;!?]\s|\n")
AND = " && "


def read_complaint(text: str, *, is_asking: bool = False) -> Evidence:
    if len(text) > MAX_COMPLAINT:
        raise InvalidRequest(f"a complaint in words may have at most {MAX_COMPLAINT} characters")
    evidence = Evidence(readings=[Reading(source="the complaint", kinds={"words"}, num_lines=1)])
    for name, value in observations_in(text):
        evidence.add(name, value, "the complaint")
    if not evidence.facts and not is_asking:
        raise InvalidRequest(
            f"{text[:60]!r} is no file, and nothing in it is understood as a complaint; say what "
            "is low, slow or wrong and what it depends on, or give --observed NAME"
        )
    return evidence


def observations_in(text: str) -> Iterator[tuple[str, object]]:
    """Return the observations of a text, all yes, and what it says was changed."""
    sentences = SENTENCES.split(text)
    found = {fact for facts, patterns in rules() if holds(patterns, sentences) for fact in facts}
    if "acceptance_fine" in found:  # then something else is what is low
        found -= {"acceptance_low", "acceptance_dropped"}
    changed = sorted(fact.removeprefix("changed=") for fact in found if "=" in fact)
    yield from ((fact, True) for fact in sorted(found) if "=" not in fact)
    if changed:
        yield "changed", changed


def holds(patterns: tuple[re.Pattern[str], ...], sentences: list[str]) -> bool:
    return any(all(pattern.search(sentence) for pattern in patterns) for sentence in sentences)


@lru_cache(maxsize=1)
def rules() -> tuple[Rule, ...]:
    macros: dict[str, str] = {}
    found = []
    for line in (FOLDER / "symptoms.txt").read_text("utf-8").splitlines():
        facts, tab, pattern = line.partition("\t")
        if tab:
            filled = re.sub(r"<([A-Z]+)>", lambda name: macros[name.group(1)], pattern)
            parts = [re.compile(part, re.IGNORECASE) for part in filled.split(AND)]
            found.append((tuple(facts.split(",")), tuple(parts)))
        elif line and not line.startswith("#"):
            name, _, value = line.partition(" = ")
            macros[name] = value
    return tuple(found)
