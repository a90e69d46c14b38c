"""Converts a forerun trace to evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from forerun.diagnose.evidence import MAX_WORD, Evidence, Reading
from forerun.diagnose.readers.trace_facts import add_contrasts, add_figures
from forerun.diagnose.readers.trace_totals import TraceTotals
from forerun.theory.record import RequestRecord, StepRecord, TraceHeader
from forerun.theory.text import ngrams
from forerun.trace.arrow import Piece, read_columns, table_of
from forerun.trace.files import Damage

METHODS = {
    **{"draft_model": "draft_model", "suffix": "ngram", "recycling": "ngram"},
    **{"eagle3": "eagle", "medusa": "mtp"},
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
