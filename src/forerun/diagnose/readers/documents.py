"""Reads JSON documents of engines, the text output of benchmark clients, and facts files.

A facts file is a JSON object, whose schema is `facts.schema.json` beside this module:

    {"forerun_facts": 1, "source": "on-call notes",
     "facts": {"tokens_per_s": 61, "output_differs": false, "changed": ["target"]}}

A value may also be an object with `value`, and optionally `source` and `interval` (two ends).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from forerun.diagnose.evidence import MAX_WORD, Evidence, Reading, shown
from forerun.diagnose.readers.engine_logs import (
    NUMBER,
    LineReader,
    Tally,
    matched_number,
    num_draft_tokens_of,
)
from forerun.errors import InvalidRequest
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
                or self._read_server_info(entry)
            )
        return known

    def close(self) -> None:
        """Add facts that depend on all documents, such as how SGLang's accept rate is defined."""
        nodes = num_draft_tokens_of(self._pairs)
        if nodes is not None:
            self.tally.set_fact("k", nodes - 1)

    def _read_timings(self, entry: Object) -> bool:
        """Read llama.cpp's `timings` of a response."""
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
        """Read TensorRT-LLM's `specDecodingStats` of an iteration."""
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
        steps, drafted = number(entry, "num_spec_steps"), number(entry, "num_draft_tokens")
        accepted = number(entry, "num_accepted_draft_tokens")
        if steps is None or drafted is None or accepted is None:
            return False
        self.kind = "vLLM request metrics"
        self.tally.count("num_drafts", steps)
        self.tally.count("num_drafted", drafted)
        self.tally.count("num_accepted", accepted)
        self.tally.set_fact("k", number(entry, "num_spec_tokens"))
        return True

    def _read_server_info(self, entry: Object) -> bool:
        length = number(entry, "avg_spec_accept_length")
        if length is None:
            return False
        self.kind = "SGLang server_info"
        if length >= 1.0:
            self.tally.set_fact("acceptance_length", length)
        return True


def _objects_in(document: object) -> Iterator[Object]:
    """Yield every object of a document, the outer ones first, within a limit on their number."""
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
    """Return a finite number of 0 or more; None otherwise."""
    value = entry.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < 1e15 else None


def _first_number(entry: Object, *names: str) -> float | None:
    return next((value for name in names if (value := number(entry, name)) is not None), None)


def label(text: str) -> re.Pattern[str]:
    return re.compile(r"^\s*" + re.escape(text) + r":\s+" + NUMBER + r"\s*$")


COUNTS = {
    "num_drafts": label("Drafts"),
    "num_drafted": label("Draft tokens"),
    "num_accepted": label("Accepted tokens"),
}
GAUGES = {
    "acceptance_length": (label("Acceptance length"), 1.0),
    "draft_acceptance_rate": (label("Acceptance rate (%)"), 0.01),
    "tokens_per_s": (label("Output token throughput (tok/s)"), 1.0),
    "ttft_s": (label("Mean TTFT (ms)"), 0.001),
}
BATCH = label("Peak concurrent requests")
KNOWN = re.compile(
    r"^\s*(?:=+ ?(?:Serving Benchmark Result|Speculative Decoding|=*).*=+|-+.*-+|"
    r"Per-position acceptance \(%\):?|(?:Successful|Failed) requests:.*|Benchmark duration.*|"
    r"Total (?:input|generated) tokens:.*|(?:Mean|Median|P\d\d) \w+ \(ms\):.*|"
    r"(?:Request|Total [Tt]oken) throughput.*|Peak .*)\s*$"
)
POSITION = re.compile(r"^\s*Position (\d{1,2}):\s+" + NUMBER + r"\s*$")
SUMMARY = re.compile(r"Throughput: " + NUMBER + r" token/s, Acceptance length: " + NUMBER)


class BenchmarkOutput(LineReader):
    """Reader of the tables of labels and values that benchmark clients print."""

    kind = "benchmark output"

    def __init__(self) -> None:
        super().__init__()
        self._rates: dict[int, float] = {}

    def read(self, line: str) -> bool:
        for name, pattern in COUNTS.items():
            if (value := matched_number(pattern, line)) is not None:
                self.tally.count(name, value)
                return True
        for name, (pattern, factor) in GAUGES.items():
            if (value := matched_number(pattern, line)) is not None:
                self.tally.set_fact(name, value * factor)
                return True
        if found := POSITION.match(line):
            self._rates[int(found.group(1))] = float(found.group(2)) / 100.0
            return True
        if found := SUMMARY.search(line):
            self.tally.set_fact("tokens_per_s", float(found.group(1)))
            self.tally.set_fact("acceptance_length", float(found.group(2)))
            return True
        return bool(KNOWN.match(line))

    def close(self) -> None:
        """Combine the rates per position into one list, if no position is missing."""
        if self._rates and sorted(self._rates) == list(range(len(self._rates))):
            rates = [self._rates[index] for index in range(len(self._rates))]
            self.tally.set_fact("acceptance_rate_per_position", rates)
