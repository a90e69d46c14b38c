"""Reads text of any engine, and passes each line to the reader of its format.

Time and memory are bounded whatever comes: bytes, lines and their lengths have limits, no pattern
backtracks further than a line, and nothing of a line is kept but its numbers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

from forerun.bounded_read import parse_json
from forerun.diagnose.evidence import Evidence, Reading
from forerun.diagnose.readers.documents import KEY, BenchmarkOutput, Documents, read_facts
from forerun.diagnose.readers.engine_logs import LineReader, LlamaCppLog, SglangLog, SpecDecodingLog
from forerun.diagnose.readers.prometheus import PrometheusText, is_metric_line
from forerun.errors import InvalidRequest, UnreadableInput


def remark(pattern: str, *facts: str) -> tuple[re.Pattern[str], tuple[str, ...]]:
    """Return a case-insensitive pattern and the observations that a matching line implies."""
    return re.compile(pattern, re.IGNORECASE), facts


# Between two words at most so much may stand: a line is no essay, and matching stays linear.
GAP = r".{0,80}?"
SPECULATION = r"(?:speculat\w*+|spec[- ]?dec\w*|draft(?:ing| model)?|assist\w*|mtp|eagle)"

REMARKS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    remark(
        r"vocab(?:ulary)?\b" + GAP + r"(?:must match|not match|mismatch|differ|incompatib)",
        "vocabularies_differ",
    ),
    remark(r"(?:tokeni[sz]er|vocab)\w*" + GAP + r"not compatible", "vocabularies_differ"),
    remark(
        r"(?:guided|grammar|structured)" + GAP + r"not supported" + GAP + SPECULATION,
        "grammar_used",
    ),
    remark(
        SPECULATION + GAP + r"(?:not supported|unsupported|disabled|not available|will not|"
        r"falling back|cannot be used|is ignored|skipping)",
        "speculation_refused",
    ),
    remark(
        r"(?:disabl\w+|ignor\w+|falling back from|skip\w+|no support for|does not support) "
        + GAP
        + SPECULATION,
        "speculation_refused",
    ),
    remark(r"not support partial sequence removal", "speculation_refused", "target_recurrent"),
    remark(
        r"(?:some weights|weights? of|tensor\w*|parameter\w*|keys?)"
        + GAP
        + r"(?:not initiali[sz]ed|newly initiali[sz]ed|missing|unexpected|not found|not loaded)",
        "weights_incomplete",
    ),
    remark(r"(?:logits|probabilit\w+|draft\w*)" + GAP + r"\bnan\b", "draft_nan"),
    remark(
        r"(?:cuda|hip|npu)[ _-]?graphs?" + GAP + r"(?:disabled|not supported|turned off|skipp)",
        "graphs_off",
    ),
    remark(r"enforce[_-]eager=True|--enforce-eager|--disable-cuda-graph", "graphs_off"),
    remark(r"\bpreempt(?:ed|ion)", "memory_pressure"),
    # Engines name settings of such layers whatever the model is; models and their state, only then.
    remark(
        r"(?:\bhybrid|\bmamba|\bssm|\bgdn|recurrent)[ -]"
        r"(?:kv|models?|attention|layers?|states?|architecture|memory|pages?|blocks?|target)\b|"
        r"memory_(?:recurrent|hybrid)|\bmamba num: [1-9]",
        "target_recurrent",
    ),
)


MAX_LENGTH = 400
"""What is said in words is said at once."""


class Remarks(LineReader):
    """Reader of log messages of any engine that imply observations."""

    kind = "engine messages"

    def read(self, line: str) -> bool:
        found = False
        line = line[:MAX_LENGTH]
        for pattern, facts in REMARKS:
            if pattern.search(line):
                found = True
                for fact in facts:
                    self.tally.set_fact(fact, True)
        return found


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
"""Lines between two looks at the clock."""
WORDS = (
    *("spec", "draft", "accept", "decode", "graph", "eager", "vocab", "tokeni", "nan", "weight"),
    *("tensor", "param", "key", "preempt", "hybrid", "mamba", "ssm", "gdn", "recurrent", "predict"),
    *("throughput", "avg thr", "eval time", "acc per pos", "n_", "position", "ttft", "tpot", "itl"),
    *("requests", "duration", "peak", "total", "===", "---", "removal", "guided", "grammar"),
    *("structured", "assist", "mtp", "eagle"),
)
"""No reader knows a line with none of these words, so most of a log is skipped quickly."""
MAX_DOCUMENT = 1 << 24
ESCAPES = re.compile(r"\x1b\[[0-9;]{0,16}[A-Za-z]")


@runtime_checkable
class Readable(Protocol):
    """Interface of a binary stream."""

    def read(self, size: int, /) -> bytes:
        """Read at most `size` bytes; none at the end."""


class PartialSource:
    """Binary stream that ends after a byte or time limit, such as the log of a running server."""

    def __init__(self, file: Readable) -> None:
        self.file = file
        self.stopped: str | None = None
        self._has_read = False

    def read(self, size: int, /) -> bytes:
        """Read at most `size` bytes; empty at the end of the stream or at a limit."""
        if self.stopped is not None:
            return b""
        try:
            data = self.file.read(size)
        except UnreadableInput as error:
            if not self._has_read:
                raise
            self.stopped = str(error)
            return b""
        self._has_read = True
        return data


def read_text(file: Readable, name: str) -> Evidence:
    """Return the evidence of a log, metrics, a benchmark's output, JSON or a facts file."""
    source = PartialSource(file)
    evidence = _read_source_text(source, name)
    if source.stopped is not None:
        evidence.readings[0].notes.append(f"only the beginning was read: {source.stopped}")
    return evidence


def _read_source_text(file: Readable, name: str) -> Evidence:
    head = b""
    while len(head) <= MAX_DOCUMENT and (chunk := file.read(MAX_DOCUMENT + 1 - len(head))):
        head += chunk
    if b"\x00" in head[:4096]:
        raise InvalidRequest(
            f"{name} is binary; give a log, metrics, JSON, facts file, or a trace of forerun"
        )
    if len(head) <= MAX_DOCUMENT:
        found = _as_document(head, name)
        if found is not None:
            return found
    return read_lines(lines_of(head, file), name)


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


def lines_of(head: bytes, file: Readable) -> Iterator[tuple[str, bool]]:
    """Return the lines, shortened to a maximum length, and whether the input ended."""
    rest, num_bytes = head, len(head)
    while True:
        *whole, rest = rest.split(b"\n")
        for line in whole:
            yield clean(line), False
        rest = rest[: MAX_LINE + 1]
        chunk = file.read(1 << 20) if num_bytes < MAX_BYTES else b""
        if not chunk:
            break
        num_bytes += len(chunk)
        rest += chunk
    yield clean(rest), num_bytes >= MAX_BYTES


def clean(line: bytes) -> str:
    return ESCAPES.sub("", line[:MAX_LINE].decode("utf-8", errors="replace")).rstrip("\r")


def read_lines(lines: Iterator[tuple[str, bool]], name: str) -> Evidence:
    """Pass every line to the first reader that recognises its format."""
    metrics, documents = PrometheusText(), Documents()
    readers: tuple[LineReader, ...] = (
        *(SpecDecodingLog(), SglangLog(), LlamaCppLog()),
        *(TensorRtLlmLog(), BenchmarkOutput(), Remarks()),
    )
    evidence = Evidence(readings=[Reading(source=name)])
    reading = evidence.readings[0]
    deadline = time.monotonic() + MAX_SECONDS
    for line, was_cut in lines:
        if was_cut:
            reading.notes.append(f"longer than {MAX_BYTES} bytes; only the beginning was read")
        if not line.strip():
            continue
        reading.num_lines += 1
        is_metric = is_metric_line(line) or metrics.metrics.num_samples > 0
        known = (is_metric and metrics.read(line)) or read_object(line, documents)
        lowered = line.lower()
        if not known and any(word in lowered for word in WORDS):
            known = any(reader.read(line) for reader in readers)
        reading.num_unknown += not known
        if reading.num_lines % CHECKED_LINES == 0 and time.monotonic() > deadline:
            reading.notes.append(f"took more than {MAX_SECONDS:g} s; the rest was not read")
            break
    concluding: tuple[Concluding, ...] = (metrics, documents, *readers)
    for found in concluding:
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


Concluding = LineReader | Documents


def _add_facts_of(reader: Concluding, evidence: Evidence, name: str) -> None:
    reader.close()
    if reader.tally.is_empty:
        return
    evidence.readings[0].kinds.add(reader.kind)
    engine = reader.kind.split()[0]
    if engine in ENGINES:
        evidence.add("engine", engine, name)
    reader.tally.add_to(evidence, f"{name}: {reader.kind}")
