"""Converts a forerun trace to evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
from msgspec.structs import replace

from forerun.bounded_read import check_regular
from forerun.diagnose.evidence import MAX_WORD, Evidence, Reading
from forerun.diagnose.readers.trace_facts import add_contrasts, add_figures
from forerun.diagnose.readers.trace_totals import TraceTotals
from forerun.errors import InvalidTrace, UnreadableInput
from forerun.theory.acceptance import ngrams
from forerun.theory.record import RequestRecord, StepRecord, TraceHeader
from forerun.trace.files import (
    COUNTS,
    DURATIONS,
    MAX_COUNT,
    MAX_NODES,
    MAX_SECONDS,
    NODE_COUNTS,
    Damage,
    item_of,
)

STEP_TYPES: Mapping[str, pa.DataType] = {
    **dict.fromkeys(
        (
            *("cycle_id", "step", "k_budget", "num_drafted", "depth_drafted", "num_accepted"),
            *("num_emitted", "batch_rows", "num_prefill_rows", "context_tokens"),
        ),
        pa.int64(),
    ),
    **dict.fromkeys(("t_s", "draft_s", "verify_s", "other_s", "expected_accepted"), pa.float64()),
    "request_id": pa.string(),
    "method": pa.string(),
    "acceptance_probability": pa.float64(),
    "graph_hit": pa.bool_(),
    "token_ids": pa.list_(pa.int64()),
}
OPTIONAL = frozenset({"acceptance_probability", "graph_hit", "token_ids"})
CHUNK_BYTES = 1 << 22
JSON_SCHEMA = pa.schema([("record", pa.string()), *STEP_TYPES.items()])

Piece: TypeAlias = pa.Table | TraceHeader | RequestRecord | Damage
"""A table of steps, or what else a trace holds."""


def read_columns(path: Path) -> Iterator[Piece]:
    """Yield the content of a trace lazily: tables of steps, headers, requests and damage."""
    try:
        yield from _json_pieces(path)
    except OSError as error:
        raise InvalidTrace(f"the trace {path} cannot be read: {error.strerror or error}") from error
    except UnreadableInput as error:
        raise InvalidTrace(f"the trace {error}") from error


def _json_pieces(path: Path) -> Iterator[Piece]:
    """Yield tables and records of a JSON lines trace, chunk by chunk."""
    check_regular(path)
    with path.open("rb") as file:
        number, rest = 1, b""
        while chunk := file.read(CHUNK_BYTES):
            whole, rest = cut(rest + chunk)
            lines = whole.splitlines(keepends=True)
            yield from _lines_pieces(lines, number)
            number += len(lines)
        yield from _lines_pieces(rest.splitlines(keepends=True), number)


def cut(data: bytes) -> tuple[bytes, bytes]:
    """Split data into complete lines and the incomplete last line."""
    end = data.rfind(b"\n") + 1
    if not end and len(data) > CHUNK_BYTES:
        return data, b""
    return data[:end], data[end:]


STEP = b'{"record":"step",'
"""How lines of our own steps begin."""


def _lines_pieces(lines: Sequence[bytes], first_line: int) -> Iterator[Piece]:
    """Yield the records in complete lines: steps as tables, other records one by one."""
    numbered = enumerate(lines, start=first_line)
    yield from one_by_one([(n, line) for n, line in numbered if not line.startswith(STEP)])
    steps = [line for line in lines if line.startswith(STEP)]
    if not steps:
        return
    try:
        table = pj.read_json(
            pa.BufferReader(b"".join(steps)),
            read_options=pj.ReadOptions(block_size=1 << 22),
            parse_options=pj.ParseOptions(
                explicit_schema=JSON_SCHEMA, unexpected_field_behavior="ignore"
            ),
        )
    except pa.ArrowException:
        table = None
    if table is None or table.num_rows != len(steps):  # damaged, or several objects on a line
        numbered = enumerate(lines, start=first_line)
        yield from one_by_one([(n, line) for n, line in numbered if line.startswith(STEP)])
        return
    yield from checked(table.select(list(STEP_TYPES)), f"lines from {first_line}")


def one_by_one(lines: Sequence[tuple[int, bytes]]) -> Iterator[Piece]:
    items = [item_of(line, f"line {number}") for number, line in lines if line.strip()]
    yield from (item for item in items if not isinstance(item, StepRecord))
    yield from table_of([item for item in items if isinstance(item, StepRecord)])


def table_of(steps: Sequence[StepRecord]) -> Iterator[pa.Table]:
    """Build a table of step records; None if there are none."""
    if steps:
        columns = {
            name: pa.array([getattr(step, name) for step in steps], kind)
            for name, kind in STEP_TYPES.items()
        }
        yield pa.table(columns)


def checked(table: pa.Table, where: str) -> Iterator[Piece]:
    """Yield the rows with valid values as a table, and `Damage` for all other rows."""
    good = pc.is_valid(table["cycle_id"])
    for name in STEP_TYPES:
        if name not in OPTIONAL:
            good = pc.and_(good, pc.is_valid(table[name]))
    order = ("num_accepted", "depth_drafted", "num_drafted")
    for less, more in pairwise(order):
        good = pc.and_kleene(good, pc.less_equal(table[less], table[more]))
    emitted = pc.less_equal(table["num_emitted"], pc.add(table["num_accepted"], 1))
    good = pc.and_kleene(good, emitted)
    for names, most in (
        (NODE_COUNTS, MAX_NODES),
        (COUNTS, MAX_COUNT),
        (DURATIONS, MAX_SECONDS),
        (("expected_accepted",), MAX_NODES),
    ):
        for name in names:  # a comparison with NaN is false
            within = pc.and_(pc.greater_equal(table[name], 0), pc.less_equal(table[name], most))
            good = pc.and_kleene(good, within)
    within = pc.less_equal(pc.abs(table["t_s"]), MAX_SECONDS)
    good = pc.and_kleene(good, within)
    kept = table.filter(good)
    if kept.num_rows < table.num_rows:
        bad = table.num_rows - kept.num_rows
        yield Damage(where=where, what=f"{bad} steps that lack a field or contradict themselves")
    if kept.num_rows:
        yield kept


METHODS = {
    **{"draft_model": "draft_model", "suffix": "ngram", "recycling": "ngram"},
    **{"eagle3": "eagle", "medusa": "mtp", "mtp": "mtp"},
}
"""Ours under the names of the vocabulary."""
MIN_PROMPT_TOKENS = 200
"""Fewer prompt tokens do not tell a text from a list of random ids."""
COMMON = 10
"""The ten commonest tokens are a good part of any text, and next to nothing of random ids."""


def _add_setup(
    evidence: Evidence, headers: Sequence[TraceHeader], methods: Mapping[str, int], source: str
) -> None:
    """Add models, versions and methods from the trace headers, and changes between headers."""
    if not headers:
        return
    evidence.note("engine", "forerun", source)
    for name, values in (
        ("target_name", {header.target for header in headers}),
        ("draft_name", {header.draft for header in headers}),
        ("target_hash", {header.target_hash for header in headers}),
        ("draft_hash", {header.draft_hash for header in headers}),
        ("engine_version", {header.versions.get("forerun") for header in headers}),
        ("device", {header.device for header in headers}),
    ):
        value = values.pop() if len(values) == 1 else None
        if value is not None and len(value) <= MAX_WORD:
            evidence.note(name, value, source)
    _add_changed_target(evidence, headers, source)
    if methods:
        most = max(methods, key=lambda method: methods[method])
        evidence.note("method", METHODS.get(most, "other"), source)


SWITCHING = frozenset({"auto", "goodput", "bandit"})
"""Controllers that plan K = 0 where they expect or measured that drafting does not pay."""


def _add_off_share(
    evidence: Evidence, headers: Sequence[TraceHeader], totals: TraceTotals, source: str
) -> None:
    """Add the share of decode steps with K = 0, if every controller can switch a draft off."""
    names = {header.controller for header in headers}
    steps = totals.request_steps.total()
    has_draft = all(header.draft is not None for header in headers)
    if steps and names and names <= SWITCHING and has_draft:
        controller = " and ".join(sorted(filter(None, names)))
        evidence.note("off_share", totals.num_off / steps, f"{source}: {controller}")


def _add_changed_target(evidence: Evidence, headers: Sequence[TraceHeader], source: str) -> None:
    """Add that the target changed, if the headers of a trace name two targets and one draft."""
    drafts = {header.draft_hash for header in headers}
    targets = {header.target_hash for header in headers}
    if len(targets) == 2 and len(drafts) == 1:
        evidence.note("changed", ["target"], f"{source}: its headers name two targets, one draft")


def _add_asked(evidence: Evidence, requests: Sequence[RequestRecord], source: str) -> None:
    """Add the verification method, if it is the same for all requests, and facts about prompts."""
    rules = {
        (r.parameters.get("verification"), r.parameters.get("draft_temperature"))
        for r in requests
        if r.parameters.get("temperature") != 0
    }
    if len(rules) == 1 and "draft_model" in evidence.words("method"):
        rule, draft_temperature = rules.pop()
        evidence.note("draft_one_hot", draft_temperature == 0, f"{source}: draft_temperature")
        if rule in ("walk", "block", "token"):
            evidence.note("exact_match_rule", rule == "walk", f"{source}: verification {rule}")
    _add_prompts(evidence, requests, source)


def _add_prompts(evidence: Evidence, requests: Sequence[RequestRecord], source: str) -> None:
    """Add whether prompts consist of random tokens, if the trace contains their tokens."""
    counts: Counter[int] = Counter()
    for request in requests:
        counts.update(request.prompt_token_ids or ())
    total = counts.total()
    if total < MIN_PROMPT_TOKENS:
        return
    share = sum(count for _, count in counts.most_common(COMMON)) / total
    answer = True if share < 0.05 else False if share > 0.12 else None
    evidence.note("random_prompts", answer, f"{source}: {share:.0%} of prompts are {COMMON} tokens")


GRAM = 4
MIN_GRAMS = 200
"""Fewer 4-grams say nothing of how repetitive a text is."""


def add_texts(evidence: Evidence, texts: Iterable[Sequence[int]], source: str) -> None:
    """Add how repetitive the outputs are, if the trace contains their tokens."""
    total = distinct = 0
    for text in texts:
        grams = [*ngrams(text, GRAM)]
        total += len(grams)
        distinct += len(set(grams))
    if total >= MIN_GRAMS:
        evidence.note("distinct_4gram_share", distinct / total, f"{source}: of {total} 4-grams")


BLOCK_ROWS = 1 << 16
MAX_HEADERS = 1000
MAX_STEPS = 5_000_000
"""More steps sharpen no figure; a trace of any length is read in bounded time."""
MAX_REQUESTS = 200_000
"""Distinct requests; each takes about a kilobyte of memory."""
MAX_TAGS = 16
"""Tags of one request."""
MAX_PROMPT_TOKENS = 1_000_000
"""Prompt tokens that are kept: enough to see whether prompts are random."""
MAX_NAMED_DAMAGE = 3
MAX_DAMAGE = 100_000
"""Places that cannot be read, after which a file is no trace."""
PARAMETERS = ("temperature", "top_k", "top_p", "verification", "draft_temperature")
"""Parameters of a request that evidence is made of."""


@dataclass(slots=True, kw_only=True)
class TraceRead:
    """Content of a trace that was read: totals, headers, requests and damage."""

    totals: TraceTotals = field(default_factory=TraceTotals)
    headers: list[TraceHeader] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    num_damaged: int = 0
    damage: list[str] = field(default_factory=list)
    num_prompt_tokens: int = 0
    limit: str | None = None


def read_trace_evidence(path: Path) -> Evidence:
    """Return the evidence of a trace; raises InvalidTrace if it cannot be read."""
    read = TraceRead()
    for block in blocks(noted(read_columns(path), read)):
        if read.totals.num_steps >= MAX_STEPS:
            read.limit = f"{MAX_STEPS} steps"
        elif len(read.totals.request_steps) >= MAX_REQUESTS:
            read.limit = f"{MAX_REQUESTS} requests"
        if read.limit:
            break
        read.totals.add(block)
    return evidence_of(read, path.name, f"trace {path.name}")


def evidence_of_steps(steps: Sequence[StepRecord], name: str) -> Evidence:
    """Return the evidence of step records in memory, given as complete cycles in order."""
    read = TraceRead()
    for table in table_of(steps):
        read.totals.add(table)
    evidence = evidence_of(read, name, name)
    method = read.totals.methods.most_common(1)
    if method:
        evidence.note("method", METHODS.get(method[0][0], "other"), name)
    return evidence


def evidence_of(read: TraceRead, name: str, source: str) -> Evidence:
    """Return the facts that follow from the totals, headers and requests of a trace."""
    evidence = Evidence(readings=[reading_of(read, name)])
    add_figures(evidence, read.totals, read.requests, source)
    add_contrasts(evidence, read.totals, read.requests, source)
    _add_setup(evidence, read.headers, read.totals.methods, source)
    _add_off_share(evidence, read.headers, read.totals, source)
    _add_asked(evidence, read.requests, source)
    add_texts(evidence, read.totals.texts.values(), source)
    return evidence


def noted(pieces: Iterable[Piece], read: TraceRead) -> Iterator[pa.Table]:
    """Yield the tables of steps, and collect headers, requests and damage."""
    for piece in pieces:
        if isinstance(piece, TraceHeader):
            if len(read.headers) < MAX_HEADERS:
                read.headers.append(piece)
        elif isinstance(piece, RequestRecord):
            if len(read.requests) < MAX_REQUESTS:
                read.requests.append(_trimmed(piece, read))
        elif isinstance(piece, Damage):
            read.num_damaged += 1
            if len(read.damage) < MAX_NAMED_DAMAGE:
                read.damage.append(str(piece))
            if read.num_damaged >= MAX_DAMAGE:
                read.limit = f"{MAX_DAMAGE} places that cannot be read"
                return
        else:
            yield piece


def _trimmed(request: RequestRecord, read: TraceRead) -> RequestRecord:
    """Remove the fields of a request that evidence does not need, to save memory."""
    tokens = request.prompt_token_ids
    if tokens is not None:
        tokens = tokens[: max(0, MAX_PROMPT_TOKENS - read.num_prompt_tokens)]
        read.num_prompt_tokens += len(tokens)
    return replace(
        request,
        tags=tuple(tag[:MAX_WORD] for tag in request.tags[:MAX_TAGS]),
        parameters={
            name: value
            for name, value in request.parameters.items()
            if name in PARAMETERS and isinstance(value, str | int | float | None)
        },
        prompt_token_ids=tokens,
    )


def blocks(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Combine tables of steps into larger ones, each of which ends with a complete cycle."""
    waiting: list[pa.Table] = []
    for table in tables:
        waiting.append(table)
        if sum(map(len, waiting)) >= BLOCK_ROWS:
            whole, rest = _before_last_cycle(pa.concat_tables(waiting))
            # A cycle as long as a block is none; without this, memory would grow with the trace.
            if not len(whole) or len(rest) >= BLOCK_ROWS:
                whole, rest = pa.concat_tables([whole, rest]), rest[:0]
            yield whole
            waiting = [rest]
    if waiting:
        yield pa.concat_tables(waiting)


def _before_last_cycle(table: pa.Table) -> tuple[pa.Table, pa.Table]:
    last = table.slice(len(table) - 1)
    same = pc.and_(
        pc.equal(table["cycle_id"], last["cycle_id"][0]), pc.equal(table["t_s"], last["t_s"][0])
    )
    start = pc.index(same, True).as_py()
    return table.slice(0, start), table.slice(start)


def reading_of(read: TraceRead, name: str) -> Reading:
    reading = Reading(source=name, kinds={"forerun trace"}, num_lines=read.totals.num_steps)
    reading.num_unknown = read.num_damaged
    reading.notes += [f"not read: {place}" for place in read.damage]
    if read.limit:
        reading.notes.append(f"longer than {read.limit}; only the beginning was read")
    if len(read.headers) > 1:
        drafts = sorted({str(header.draft) for header in read.headers})
        reading.notes.append(f"several runs in one trace, drafts {', '.join(drafts)}")
    return reading
