"""Reads evidence from a named source: a trace, a text file, standard input or a URL.

A facts file is a JSON object, whose schema is `facts.schema.json` beside this module:

    {"forerun_facts": 1, "source": "on-call notes",
     "facts": {"tokens_per_s": 61, "output_differs": false, "changed": ["target"]}}

A value may also be an object with `value`, and optionally `source` and `interval` (two ends).

Time and memory are bounded whatever comes: bytes, lines and their lengths have limits, no pattern
backtracks further than a line, and nothing of a line is kept but its numbers.
"""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, runtime_checkable

from forerun.bounded_read import (
    BoundedFile,
    ReadLimits,
    open_bounded,
    open_stdin,
    parse_json,
)
from forerun.client.urls import hide_urls, is_url, shown_url
from forerun.doctor.evidence import COUNTS, MAX_WORD, Evidence, Reading, shown
from forerun.doctor.readers.complaint import read_complaint, rules
from forerun.doctor.readers.engine_logs import (
    NUMBER,
    LineReader,
    LlamaCppLog,
    SglangLog,
    SpecDecodingLog,
    Tally,
    matched_number,
    num_draft_tokens_of,
)
from forerun.doctor.readers.prometheus import (
    OUTPUT_TOKENS,
    PrometheusText,
    is_metric_line,
    metrics_of,
    read_page,
)
from forerun.errors import InvalidRequest, UnreadableInput
from forerun.theory.intervals import Interval
from forerun.theory.record import Json

FORMAT = 1
KEY = "forerun_facts"


def read_facts(document: Mapping[str, object], name: str) -> Evidence:
    """Return the evidence of a parsed facts file."""
    version = document.get(KEY)
    if version != FORMAT:
        raise InvalidRequest(
            f"{name} has facts format {shown(version)}; this forerun reads {FORMAT}"
        )
    facts = document.get("facts")
    if not isinstance(facts, Mapping):
        raise InvalidRequest(f"{name} has no object named facts")
    given = document.get("source")
    source = f"{name}: {given[:MAX_WORD]}" if isinstance(given, str) else name
    evidence = Evidence(readings=[Reading(source=name, kinds={"facts"}, num_lines=len(facts))])
    for key, value in facts.items():
        try:
            _add_fact(evidence, str(key), value, source)
        except ValueError as error:
            raise InvalidRequest(f"{name}: {error}") from error
    return evidence


def facts_document(evidence: Evidence, source: str) -> dict[str, Json]:
    """Return evidence as the content of a facts file for `read_facts`."""
    facts: dict[str, Json] = {}
    for fact in evidence:
        value: Json = [*fact.value] if isinstance(fact.value, tuple) else fact.value
        entry: dict[str, Json] = {"value": value, "source": fact.source[:MAX_WORD]}
        if fact.interval is not None:
            entry["interval"] = [fact.interval.low, fact.interval.high]
        facts[fact.name] = entry
    return {KEY: FORMAT, "source": source[:MAX_WORD], "facts": facts}


def _add_fact(evidence: Evidence, key: str, value: object, source: str) -> None:
    if not isinstance(value, Mapping):
        evidence.add(key, value, source)
        return
    if unknown := set(map(str, value)) - {"value", "source", "interval"}:
        raise ValueError(f"{key} has unknown entries {', '.join(sorted(unknown))[:MAX_WORD]}")
    own = value.get("source")
    where = own[:MAX_WORD] if isinstance(own, str) else source
    evidence.add(key, value.get("value"), where, interval_of(key, value))


def interval_of(key: str, value: Mapping[str, object]) -> Interval | None:
    """Check that the interval of a fact has two ends around its value."""
    ends, estimate = value.get("interval"), value.get("value")
    if ends is None:
        return None
    numbers = [estimate, *ends] if isinstance(ends, list) else []
    if len(numbers) != 3 or not all(
        isinstance(number, int | float) and not isinstance(number, bool) for number in numbers
    ):
        raise ValueError(f"{key}: interval must be two numbers around a number")
    try:
        middle, low, high = (float(number) for number in numbers)
    except OverflowError as error:
        raise ValueError(f"{key}: interval has a number that is too large") from error
    if not low <= middle <= high:
        raise ValueError(f"{key}: interval {low:g} to {high:g} does not hold {middle:g}")
    return Interval(estimate=middle, low=low, high=high)


MAX_DEPTH = 12
MAX_OBJECTS = 100_000

Object = Mapping[str, object]


class Documents:
    """Reads the JSON objects of engines at any depth of a document."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.kind = "JSON"
        self._pairs: list[tuple[float, float]] = []

    def read(self, document: object) -> bool:
        """Read one document; False if it contains no known object."""
        known = False
        for entry in _objects_in(document):
            known |= (
                self._read_timings(entry)
                or self._read_iteration(entry)
                or self._read_meta_info(entry)
                or self._read_request_metrics(entry)
                or self._read_lm_studio(entry)
                or self._read_server_info(entry)
            )
        return known

    def close(self) -> None:
        nodes = num_draft_tokens_of(self._pairs)
        if nodes is not None:
            self.tally.set_fact("k", nodes - 1)

    def _read_timings(self, entry: Object) -> bool:
        drafted, accepted = number(entry, "draft_n"), number(entry, "draft_n_accepted")
        tokens, milliseconds = number(entry, "predicted_n"), number(entry, "predicted_ms")
        if tokens is None or milliseconds is None:
            return False
        self.kind = "llama.cpp timings"
        if drafted is not None and accepted is not None:
            self.tally.count("num_drafted", drafted)
            self.tally.count("num_accepted", accepted)
            # Every step emits what it accepts and one more; the first token is the prompt's.
            if tokens - 1 - accepted > 0:
                self.tally.count("num_drafts", tokens - 1 - accepted)
        else:
            self.tally.count("num_drafts", 0.0)
            self.tally.count("num_steps", tokens)
        if milliseconds > 0:
            self.tally.mean("tokens_per_s", 1000.0 * tokens / milliseconds, tokens)
            prompt = number(entry, "prompt_ms")
            if prompt is not None:
                self.tally.mean("prefill_share", prompt / (prompt + milliseconds), tokens)
        return True

    def _read_iteration(self, entry: Object) -> bool:
        stats = entry.get("specDecodingStats")
        if not isinstance(stats, Mapping):
            return False
        self.kind = "TensorRT-LLM statistics"
        drafted, accepted = number(stats, "numDraftTokens"), number(stats, "numAcceptedTokens")
        requests = number(stats, "numRequestsWithDraftTokens")
        if drafted is None or accepted is None:
            return True
        self.tally.count("num_drafted", drafted)
        self.tally.count("num_accepted", accepted)
        if requests:
            self.tally.count("num_drafts", requests)
            self.tally.mean("batch", requests)
        latency, overhead = number(stats, "iterLatencyMS"), number(stats, "draftOverhead")
        if latency and requests:
            self.tally.mean("cycle_s", latency / 1000.0)
            if overhead is not None and 0.0 <= overhead <= 1.0:
                self.tally.mean("draft_s", overhead * latency / 1000.0)
        return True

    def _read_meta_info(self, entry: Object) -> bool:
        """Read SGLang's `meta_info` of a response, under its older and newer field names."""
        calls, length = number(entry, "spec_verify_ct"), number(entry, "spec_accept_length")
        if calls is None and length is None:
            return False
        self.kind = "SGLang meta_info"
        accepted = _first_number(entry, "spec_num_correct_drafts", "spec_accept_token_num")
        drafted = _first_number(entry, "spec_num_proposed_drafts", "spec_draft_token_num")
        if calls and accepted is not None and drafted is not None:
            self.tally.count("num_drafts", calls)
            self.tally.count("num_accepted", accepted)
            self.tally.count("num_drafted", drafted)
        elif length is not None and length >= 1.0:
            self.tally.mean("acceptance_length", length, calls or 1.0)
        rate = number(entry, "spec_accept_rate")
        if length is not None and rate:
            self._pairs.append((length, rate))
        return True

    def _read_request_metrics(self, entry: Object) -> bool:
        """Read vLLM's `metrics.speculative_decoding` of a response."""
        names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
        values = [number(entry, name) for name in names]
        if None in values:
            return False
        self.kind = "vLLM request metrics"
        for fact, value in zip(("num_drafts", "num_drafted", "num_accepted"), values, strict=True):
            self.tally.count(fact, value or 0.0)
        self.tally.set_fact("k", number(entry, "num_spec_tokens"))
        return True

    def _read_lm_studio(self, entry: Object) -> bool:
        """Read the `stats` of LM Studio's responses; its clients spell the names in camel case."""
        stats, usage = entry.get("stats"), entry.get("usage")
        if not isinstance(stats, Mapping):
            return False
        drafted = _first_number(stats, "total_draft_tokens_count", "totalDraftTokensCount")
        accepted = _first_number(stats, "accepted_draft_tokens_count", "acceptedDraftTokensCount")
        if drafted is None or accepted is None:
            return False
        self.kind = "LM Studio statistics"
        self.tally.count("num_drafted", drafted)
        self.tally.count("num_accepted", accepted)
        self.tally.set_fact("method", "draft_model")
        tokens = number(stats, "predictedTokensCount")
        if tokens is None and isinstance(usage, Mapping):
            tokens = number(usage, "completion_tokens")
        if tokens is not None and tokens - 1 - accepted > 0:
            self.tally.count("num_drafts", tokens - 1 - accepted)
        if rate := _first_number(stats, "tokens_per_second", "tokensPerSecond"):
            self.tally.mean("tokens_per_s", rate, tokens or 1.0)
        return True

    def _read_server_info(self, entry: Object) -> bool:
        length = number(entry, "avg_spec_accept_length")
        if length is not None and length >= 1.0:
            self.tally.set_fact("acceptance_length", length)
        self.kind = self.kind if length is None else "SGLang server_info"
        return length is not None


def _objects_in(document: object) -> Iterator[Object]:
    waiting: list[tuple[object, int]] = [(document, 0)]
    num_objects = 0
    while waiting and num_objects < MAX_OBJECTS:
        value, depth = waiting.pop()
        if isinstance(value, Mapping):
            num_objects += 1
            yield value
        inner = list(value.values()) if isinstance(value, Mapping) else value
        if depth < MAX_DEPTH and isinstance(inner, list):
            waiting += [(entry, depth + 1) for entry in inner if isinstance(entry, dict | list)]


def number(entry: Object, name: str) -> float | None:
    value = entry.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < 1e15 else None


def _first_number(entry: Object, *names: str) -> float | None:
    return next((value for name in names if (value := number(entry, name)) is not None), None)


def _label(*texts: str) -> re.Pattern[str]:
    labels = "|".join(map(re.escape, texts))
    return re.compile(rf"^\s*(?:{labels}):\s+{NUMBER}\s*$")


LABELS = {
    "num_drafts": (_label("Drafts", "Number of draft proposals", "num_drafts"), 1.0),
    "num_drafted": (
        _label("Draft tokens", "Number of draft tokens generated", "num_draft_tokens"),
        1.0,
    ),
    "num_accepted": (
        _label("Accepted tokens", "Number of accepted tokens", "num_accepted_tokens"),
        1.0,
    ),
    "acceptance_length": (
        _label(
            *("Acceptance length", "Mean acceptance length", "mean acceptance length"),
            *("Average Accept length", "Average accept length"),
        ),
        1.0,
    ),
    "draft_acceptance_rate": (_label("Acceptance rate (%)"), 0.01),
    "tokens_per_s": (_label("Output token throughput (tok/s)"), 1.0),
    "ttft_s": (_label("Mean TTFT (ms)"), 0.001),
}
KNOWN = re.compile(
    r"^\s*(?:=+ ?(?:Serving Benchmark Result|Speculative Decoding|=*).*=+|-+.*-+|"
    r"Per-position acceptance \(%\):?|(?:Successful|Failed) requests:.*|Benchmark duration.*|"
    r"(?:Total (?:input|generated|output) tokens|total_num_output_tokens):.*|"
    r"(?:Mean|Median|P\d\d) \w+ \(ms\):.*|"
    r"(?:Request|Total [Tt]oken) throughput.*|Peak .*)\s*$"
)
POSITION = re.compile(
    r"^\s*(Position|(?:Acceptance rate|acceptance) at token) (\d{1,2}):\s+" + NUMBER + r"\s*$"
)
THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}\b)")
SUMMARY = re.compile(r"Throughput: " + NUMBER + r" token/s, Acceptance length: " + NUMBER)


class BenchmarkOutput(LineReader):
    """Reader of the tables of labels and values that benchmark clients print."""

    kind = "benchmark output"

    def __init__(self) -> None:
        super().__init__()
        self._rates: dict[int, float] = {}

    def read(self, line: str) -> bool:
        line = THOUSANDS.sub("", line)
        for name, (pattern, factor) in LABELS.items():
            if (value := matched_number(pattern, line)) is not None:
                add = self.tally.count if name in COUNTS else self.tally.set_fact
                add(name, value * factor)
                return True
        if found := POSITION.match(line):
            label, place, rate = found.groups()
            self._rates[int(place)] = float(rate) / (100.0 if label == "Position" else 1.0)
            return True
        if found := SUMMARY.search(line):
            self.tally.set_fact("tokens_per_s", float(found.group(1)))
            self.tally.set_fact("acceptance_length", float(found.group(2)))
            return True
        return bool(KNOWN.match(line))

    def close(self) -> None:
        if self._rates and sorted(self._rates) == list(range(len(self._rates))):
            rates = [self._rates[index] for index in range(len(self._rates))]
            self.tally.set_fact("acceptance_rate_per_position", rates)


MAX_LENGTH = 400
"""Number of characters at the start of a line that are searched for messages."""


class Messages(LineReader):
    """Reader of log messages of any engine that imply observations."""

    kind = "engine messages"

    def read(self, line: str) -> bool:
        line = line[:MAX_LENGTH]
        matching = (rule.facts for rule in rules("messages") if rule.holds(line))
        found = {name: True for facts in matching for name, _ in facts}
        self.tally.facts |= found
        return bool(found)


GATE = re.compile(r"\[SpeculationGate\] Speculative decoding disabled: rolling acceptance avg")


class TensorRtLlmLog(LineReader):
    """Reader of TensorRT-LLM's log, whose acceptance threshold disables drafting permanently."""

    kind = "TensorRT-LLM log"

    def read(self, line: str) -> bool:
        if not GATE.search(line):
            return False
        for name in ("speculation_off", "adaptive_k", "adaptive_stuck", "acceptance_low"):
            self.tally.set_fact(name, True)
        return True


MAX_BYTES = 1 << 26
"""Bytes that are read of a log; a longer log is cut, which a note reports."""
MAX_LINE = 1 << 14
MAX_SECONDS = 10.0
CHECKED_LINES = 512
"""Number of lines after which the time limit is checked."""
WORDS = (
    *("spec", "draft", "accept", "decode", "graph", "eager", "vocab", "tokeni", "nan", "weight"),
    *("tensor", "param", "key", "preempt", "hybrid", "mamba", "ssm", "gdn", "recurrent", "predict"),
    *("throughput", "avg thr", "eval time", "acc per pos", "n_", "position", "ttft", "tpot", "itl"),
    *("requests", "duration", "peak", "total", "===", "---", "removal", "guided", "grammar"),
    *("structured", "assist", "mtp", "eagle"),
)
"""Words of which every line that a reader recognises contains one; other lines are skipped."""
UNREAD = re.compile(r"accept\w* (?:rate|len\w*)\W{1,4}[0-9]")
"""Beginning of a figure of acceptance; a line with one that no reader knows is named."""
MAX_UNREAD = 8
MAX_DOCUMENT = 1 << 24
ESCAPES = re.compile(r"\x1b\[[0-9;]{0,16}[A-Za-z]")


@runtime_checkable
class Readable(Protocol):
    """A binary stream."""

    def read(self, size: int, /) -> bytes:
        """Read at most `size` bytes; none at the end."""


def read_text(file: Readable, name: str) -> Evidence:
    """Return the evidence of a log, metrics, a benchmark's output, JSON or a facts file."""
    data, note = _read_beginning(file)
    if b"\x00" in data[:4096]:
        raise InvalidRequest(
            f"{name} is binary; give a log, metrics, JSON, facts file, or a trace of forerun"
        )
    evidence = _as_document(data, name) if len(data) <= MAX_DOCUMENT else None
    if evidence is None:
        evidence = read_lines(map(clean, io.BytesIO(data)), name)
    reading = evidence.readings[0]
    if not (reading.num_lines or reading.kinds):
        raise InvalidRequest(f"{name} is empty; give a log, metrics, JSON or a trace with content")
    reading.notes += [note] if note else []
    return evidence


def _read_beginning(file: Readable) -> tuple[bytes, str]:
    """Return what can be read within the limits, and a note where that is not everything.

    The log of a running server ends at a limit of time.
    """
    chunks: list[bytes] = []
    num_bytes = 0
    while num_bytes < MAX_BYTES:
        try:
            chunk = file.read(1 << 20)
        except UnreadableInput as error:
            if not chunks:
                raise
            return b"".join(chunks), f"only the beginning was read: {error}"
        if not chunk:
            return b"".join(chunks), ""
        chunks.append(chunk)
        num_bytes += len(chunk)
    return b"".join(chunks), f"longer than {MAX_BYTES} bytes; only the beginning was read"


def _as_document(data: bytes, name: str) -> Evidence | None:
    """Parse a whole JSON document, such as a facts file; None where it is none."""
    if data.startswith(f"{KEY}:".encode()):
        raise InvalidRequest(f"{name} is a facts file in YAML; write it as JSON")
    if data.lstrip()[:1] not in (b"{", b"["):
        return None
    try:
        document = parse_json(data, name)
    except UnreadableInput:
        if KEY.encode() in data[:8192]:
            raise
        return None
    if isinstance(document, Mapping) and KEY in document:
        return read_facts(document, name)
    evidence = Evidence(readings=[Reading(source=name, num_lines=1)])
    documents = Documents()
    if not documents.read(document):
        evidence.readings[0].num_unknown = 1
        return evidence
    _add_facts_of(documents, evidence, name)
    return evidence


def clean(line: bytes) -> str:
    """Return a line as text, shortened to a maximum length, without colours and line end."""
    return ESCAPES.sub("", line[:MAX_LINE].decode("utf-8", errors="replace")).rstrip("\r\n")


def read_lines(lines: Iterable[str], name: str) -> Evidence:
    """Pass every line to the first reader that recognises its format."""
    metrics, documents = PrometheusText(), Documents()
    readers: tuple[LineReader, ...] = (
        *(SpecDecodingLog(), SglangLog(), LlamaCppLog()),
        *(TensorRtLlmLog(), BenchmarkOutput(), Messages()),
    )
    evidence = Evidence(readings=[Reading(source=name)])
    reading = evidence.readings[0]
    deadline = time.monotonic() + MAX_SECONDS
    for line in lines:
        if not line.strip():
            continue
        reading.num_lines += 1
        is_metric = is_metric_line(line) or metrics.metrics.num_samples > 0
        known = (is_metric and metrics.read(line)) or read_object(line, documents)
        lowered = line.lower()
        if not known and any(word in lowered for word in WORDS):
            known = any(reader.read(line) for reader in readers)
        if not known:
            reading.num_unknown += 1
            if UNREAD.search(lowered) and len(reading.unread) < MAX_UNREAD:
                reading.unread.append(line.strip()[:MAX_WORD])
        if reading.num_lines % CHECKED_LINES == 0 and time.monotonic() > deadline:
            reading.notes.append(f"took more than {MAX_SECONDS:g} s; the rest was not read")
            break
    _add_facts_of(metrics, evidence, name)
    _add_facts_of(documents, evidence, name)
    for found in readers:
        _add_facts_of(found, evidence, name)
    engines = {kind.split()[0] for kind in reading.kinds if kind.split()[0] in ENGINES}
    if len(engines) > 1:
        reading.notes.append(
            f"lines of several engines ({', '.join(sorted(engines))}) in one source; where they "
            "differ, the first one's figures are used: give each engine a source of its own"
        )
    return evidence


ENGINES = frozenset({"forerun", "vLLM", "SGLang", "TensorRT-LLM", "llama.cpp", "LMDeploy"})


def read_object(line: str, documents: Documents) -> bool:
    if not line.startswith("{"):
        return False
    try:
        return documents.read(parse_json(line, "the line"))
    except UnreadableInput:
        return False


def _add_facts_of(reader: LineReader | Documents, evidence: Evidence, name: str) -> None:
    reader.close()
    if reader.tally.is_empty:
        return
    evidence.readings[0].kinds.add(reader.kind)
    engine = reader.kind.split()[0]
    if engine in ENGINES:
        evidence.add("engine", engine, name)
    reader.tally.add_to(evidence, f"{name}: {reader.kind}")


MAX_PAGE_BYTES = 1 << 25
TIMEOUT_S = 10.0
MAX_INTERVAL_S = 600.0


def read_live(
    url: str,
    *,
    interval_s: float,
    key_variable: str | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Evidence:
    """Return evidence from two samples of a server, or from its totals if the server was idle."""
    if not 0.0 < interval_s <= MAX_INTERVAL_S:
        raise InvalidRequest(f"--interval-s is {interval_s}; it must be above 0, at most 600")
    first = page_of(url, key_variable)
    started = time.monotonic()
    sleep(interval_s)
    second, url = page_of(url, key_variable), shown_url(url)
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
    for name in OUTPUT_TOKENS:
        tokens = second.metrics.totals.get(name, 0.0) - first.metrics.totals.get(name, 0.0)
        if tokens > 0.0 and seconds > 0.0 and "tokens_per_s" not in evidence:
            evidence.note("tokens_per_s", tokens / seconds, source)
    return evidence


def page_of(url: str, key_variable: str | None = None) -> PrometheusText:
    """Read a live page of metrics once; raises InvalidRequest where it cannot be read.

    A URL of a server, without a path, is read at /metrics.
    `key_variable` is the environment variable of the API key; None takes OPENAI_API_KEY.
    """
    from forerun.client.door import authorization, fetch_page

    if url.count("/") == 2 + url.endswith("/") and not set("?#") & set(url):
        url = f"{url.rstrip('/')}/metrics"
    limits = ReadLimits(max_bytes=MAX_PAGE_BYTES, max_seconds=TIMEOUT_S)
    try:
        body = fetch_page(url, limits, authorization(key_variable))
    except UnreadableInput as error:
        raise InvalidRequest(str(error)) from error
    page = read_page(body.decode("utf-8", errors="replace"))
    if not page.metrics.totals:
        hint = "" if url.endswith("/metrics") else "; try its path /metrics"
        raise InvalidRequest(f"{shown_url(url)} holds no metric of an engine that is known{hint}")
    page.close()
    return page


TRACE_START = b'{"record":'
LIMITS = ReadLimits(max_bytes=1 << 32, max_seconds=600.0)
"""Limits of one source. A log may be piped from a running server, so minutes are allowed."""


def read_source(name: str, *, interval_s: float, key_variable: str | None = None) -> Evidence:
    """Return the evidence of one source; words that name no file are a complaint.

    Args:
        name: file, URL, "-" or words.
        interval_s: between two samples of a URL.
        key_variable: environment variable of the API key of a URL; None takes OPENAI_API_KEY.
    """
    if is_url(name):
        return read_live(name, interval_s=interval_s, key_variable=key_variable)
    try:
        if name == "-":
            with open_stdin(LIMITS) as stream:
                return _read_stream(stream, "stdin")
        path = Path(name)
        if (" " in name.strip() or name.isalpha()) and not os.path.lexists(path):
            return read_complaint(name)
        if path.is_dir():
            return read_trace(path)
        with open_bounded(path, LIMITS, name=path.name) as file:
            if file.peek(len(TRACE_START)) == TRACE_START and path.is_file():
                return read_trace(path)
            return _read_stream(file, path.name)
    except OSError as error:
        shown = hide_urls(name[:300])
        raise InvalidRequest(f"{shown} cannot be read: {error.strerror or error}") from error
    except UnreadableInput as error:
        raise InvalidRequest(str(error)) from error


def read_trace(path: Path) -> Evidence:
    """Return the evidence of a forerun trace."""
    from forerun.doctor.readers.trace import read_trace_evidence

    return read_trace_evidence(path)


def _read_stream(file: BoundedFile, name: str) -> Evidence:
    """Return the evidence of a stream; a trace is copied into a file first."""
    if file.peek(len(TRACE_START)) != TRACE_START:
        return read_text(file, name)
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        with path.open("wb") as copy:
            while chunk := file.read():
                copy.write(chunk)
        return read_trace(path)
