"""Run a fault: its stages, one after another, into one trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.lab.dice import Dice
from tests.lab.laboratory import Lab
from tests.lab.setups import Fault, FaultRequest, FaultSetup, Stage

from forerun.engine.config import RequestTerms
from forerun.engine.engine import Engine
from forerun.engine.observing import EmittedRecords
from forerun.engine.results import RequestOutput, request_records
from forerun.models.checkpoint import ModelFiles
from forerun.provenance import trace_header
from forerun.theory.record import Json, StepRecord
from forerun.trace.files import TraceWriter, open_trace

__all__ = ["FaultRun", "run_fault"]


NO_TIMES: Mapping[str, Json] = {"ttft_s": None, "prefill_s": None}
"""Of requests, for these are told by the clock on the wall."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FaultRun:
    """A fault that was run.

    Attributes:
        fault: which.
        seed: of its set-up.
        trace: where the trace is.
        says: what a person would enter besides, as facts by name.
        engine: the engine of the last stage, as it was, for a probe.
        requests: of the last stage.
        target_folder: files of its target.
        draft_folder: files of its draft, None without a draft model.
        outputs: what the last stage came to.
    """

    fault: Fault
    seed: int
    trace: Path
    says: Mapping[str, float]
    engine: Engine
    requests: Sequence[FaultRequest]
    target_folder: Path
    draft_folder: Path | None
    outputs: tuple[RequestOutput, ...]


def run_fault(fault: Fault, seed: int, trace: Path, lab: Lab) -> FaultRun:
    """Run a fault and write its trace.

    Args:
        fault: or a control.
        seed: decides prompts, parameters and the size of the fault.
        trace: file to write, .jsonl.
        lab: with the models.
    """
    setup = fault.inject(lab, Dice(seed, fault.name))
    with open_trace(trace) as writer:
        played = [play(stage, writer, first, lab) for stage, first in with_headers(setup)]
    last = played[-1]
    says = dict(setup.says)
    if setup.client is not None:
        num_tokens = sum(len(output.token_ids) for output in last.outputs)
        says |= setup.client(num_tokens, last.num_chunks, last.seconds)
    return FaultRun(
        fault=fault,
        seed=seed,
        trace=trace,
        says=says,
        engine=setup.stages[-1].engine,
        requests=setup.stages[-1].requests,
        target_folder=ModelFiles.find(setup.stages[-1].target).folder,
        draft_folder=folder_of(setup),
        outputs=last.outputs,
    )


def folder_of(setup: FaultSetup) -> Path | None:
    """Files of the draft that the last stage was meant to have."""
    draft = setup.stages[-1].draft
    return setup.draft_folder or (None if draft is None else ModelFiles.find(draft).folder)


def with_headers(setup: FaultSetup) -> Iterator[tuple[Stage, bool]]:
    """Stages, and whether one needs a header of its own: it is of another pair than before.

    A plain stage has no draft; it is headed by the pair it is to be compared with.
    """
    pairs = [(stage.target, stage.draft) for stage in setup.stages]
    changed = [True, *(before != after for before, after in pairwise(pairs))]
    yield from zip(setup.stages, changed, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What a stage came to.

    Attributes:
        outputs: one per request, in order.
        num_chunks: deliveries to clients.
        seconds: from the first request to the last token.
    """

    outputs: tuple[RequestOutput, ...]
    num_chunks: int
    seconds: float


def play(stage: Stage, trace: TraceWriter, headed: bool, lab: Lab) -> Played:
    """Run a stage to its end; its steps and requests go into the trace."""
    if headed:
        trace.add(trace_header(stage.target, stage.draft, "cpu"))
    engine, records = stage.engine, list[StepRecord]()
    engine.observers[:] = [EmittedRecords(records.append)]
    names = [f"{stage.name}-{index}" for index in range(len(stage.requests))]
    before = lab.device.spent()
    for name, request in zip(names, stage.requests, strict=True):
        terms = RequestTerms(tags=request.tags)
        engine.add_request(request.prompt, request.params, request_id=name, terms=terms)
    num_chunks = 0
    while engine.has_unfinished:
        num_chunks += len(engine.step())
    seconds = lab.device.spent().since(before).total_s
    engine.observers.clear()
    outputs = tuple(engine.take_output(name) for name in names)
    write(stage, records, outputs, trace)
    return Played(outputs=outputs, num_chunks=num_chunks, seconds=seconds)


def write(
    stage: Stage,
    records: list[StepRecord],
    outputs: tuple[RequestOutput, ...],
    trace: TraceWriter,
) -> None:
    """Steps with their tokens, then requests."""
    texts = {output.request_id: iter(output.token_ids) for output in outputs}
    for record in records:
        tokens = tuple(next(texts[record.request_id]) for _ in range(record.num_emitted))
        changes: Mapping[str, Json] = {"token_ids": tokens}
        trace.add(record, changes)
    for output, request in zip(outputs, stage.requests, strict=True):
        for finished in request_records(output, request.params, request.tags, with_tokens=True):
            trace.add(finished, NO_TIMES)
