"""Our own traces as evidence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from forerun.diagnose.evidence import Evidence, Reading
from forerun.diagnose.readers.trace.contrasts import add_contrasts
from forerun.diagnose.readers.trace.figures import add_figures
from forerun.diagnose.readers.trace.setting import add_asked, add_setup, add_texts
from forerun.diagnose.readers.trace.totals import TraceTotals
from forerun.theory.record import RequestRecord, TraceHeader
from forerun.trace.columns import Piece, read_columns
from forerun.trace.schema import Damage

__all__ = ["TraceRead", "read_trace_evidence"]

BLOCK_ROWS = 1 << 17
MAX_STEPS = 5_000_000
"""More steps sharpen no figure; a trace of any length is read in bounded time."""
MAX_NAMED_DAMAGE = 3


@dataclass(slots=True, kw_only=True)
class TraceRead:
    """Everything of a trace that evidence is made of.

    Attributes:
        totals: over its steps.
        headers: what was run.
        requests: finished requests.
        num_damaged: places that could not be read.
        damage: the first of them, in words.
        cut: whether the trace goes on behind what was read.
    """

    totals: TraceTotals = field(default_factory=TraceTotals)
    headers: list[TraceHeader] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    num_damaged: int = 0
    damage: list[str] = field(default_factory=list)
    cut: bool = False


def read_trace_evidence(path: Path) -> Evidence:
    """Evidence of a trace.

    Raises:
        InvalidTrace: it cannot be read.
    """
    read = TraceRead()
    for block in blocks(noted(read_columns(path), read)):
        if read.totals.num_steps >= MAX_STEPS:
            read.cut = True
            break
        read.totals.add(block)
    evidence = Evidence(readings=[reading_of(read, path.name)])
    source = f"trace {path.name}"
    add_figures(evidence, read.totals, read.requests, source)
    add_contrasts(evidence, read.totals, read.requests, source)
    add_setup(evidence, read.headers, read.totals.methods, source)
    add_asked(evidence, read.requests, source)
    add_texts(evidence, read.totals.texts.values(), source)
    return evidence


def noted(pieces: Iterable[Piece], read: TraceRead) -> Iterator[pa.Table]:
    """The tables of steps; everything else is kept on the way."""
    for piece in pieces:
        if isinstance(piece, TraceHeader):
            read.headers.append(piece)
        elif isinstance(piece, RequestRecord):
            read.requests.append(piece)
        elif isinstance(piece, Damage):
            read.num_damaged += 1
            if len(read.damage) < MAX_NAMED_DAMAGE:
                read.damage.append(str(piece))
        else:
            yield piece


def blocks(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Large tables whose ends are ends of cycles."""
    waiting: list[pa.Table] = []
    for table in tables:
        waiting.append(table)
        if sum(map(len, waiting)) >= BLOCK_ROWS:
            whole, rest = before_last_cycle(pa.concat_tables(waiting))
            if len(whole):
                yield whole
            waiting = [rest]
    if waiting:
        yield pa.concat_tables(waiting)


def before_last_cycle(table: pa.Table) -> tuple[pa.Table, pa.Table]:
    """All cycles but the last, which may go on in the next table; and that one."""
    last = table.slice(len(table) - 1)
    same = pc.and_(
        pc.equal(table["cycle_id"], last["cycle_id"][0]), pc.equal(table["t_s"], last["t_s"][0])
    )
    start = pc.index(same, True).as_py()
    return table.slice(0, start), table.slice(start)


def reading_of(read: TraceRead, name: str) -> Reading:
    """How the trace was read."""
    reading = Reading(source=name, kinds={"forerun trace"}, num_lines=read.totals.num_steps)
    reading.num_unknown = read.num_damaged
    reading.notes += [f"not read: {place}" for place in read.damage]
    if read.cut:
        reading.notes.append(f"longer than {MAX_STEPS} steps; only the beginning was read")
    if len(read.headers) > 1:
        drafts = sorted({str(header.draft) for header in read.headers})
        reading.notes.append(f"several runs in one trace, drafts {', '.join(drafts)}")
    return reading
