"""Writes the trace of a comparison, in which every request is tagged with its arm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from forerun.bench.compare import BenchArm
from forerun.engine.engine import Engine
from forerun.engine.observing import EmittedRecords
from forerun.engine.results import RequestOutput, request_records
from forerun.sampling.config import SamplingParams
from forerun.theory.record import Json, StepRecord
from forerun.trace.writer import TraceWriter

__all__ = ["BenchTrace", "TracedEngine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Requests and step records of one `generate` call."""

    params: tuple[SamplingParams, ...]
    records: list[StepRecord]
    outputs: list[RequestOutput]


@dataclass(slots=True, kw_only=True, eq=False)
class TracedEngine:
    """Engine wrapper that keeps step records in memory until the measurement is over.

    Attributes:
        engine: what generates.
        arm: name of the arm; it is part of every request id.
        tags: of its requests.
        drafter_hash: content hash of its draft.
        calls: what has not been written.
    """

    engine: Engine
    arm: str
    tags: tuple[str, ...]
    drafter_hash: str | None
    calls: list[Call] = field(default_factory=list)

    def generate(
        self, prompts: Sequence[str], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """Generate with the engine, and keep the records."""
        each = (params,) * len(prompts) if isinstance(params, SamplingParams) else tuple(params)
        records: list[StepRecord] = []
        observer = EmittedRecords(records.append)
        self.engine.observers.append(observer)
        try:
            outputs = self.engine.generate(prompts, each)
        finally:
            self.engine.observers.remove(observer)
        self.calls.append(Call(params=each, records=records, outputs=outputs))
        return outputs

    def write(self, trace: TraceWriter, *, with_tokens: bool) -> None:
        """Write the kept records to a trace."""
        for call in self.calls:
            texts = {output.request_id: iter(output.token_ids) for output in call.outputs}
            for record in call.records:
                emitted = tuple(next(texts[record.request_id]) for _ in range(record.num_emitted))
                changes: Mapping[str, Json] = {
                    "request_id": self._name(record.request_id),
                    "drafter_hash": self.drafter_hash if record.num_drafted else None,
                    "token_ids": emitted if with_tokens else None,
                }
                trace.add(record, changes)
            for output, params in zip(call.outputs, call.params, strict=True):
                for request in request_records(output, params, self.tags, with_tokens=with_tokens):
                    trace.add(request, {"request_id": self._name(request.request_id)})
        self.calls.clear()

    def _name(self, request_id: str) -> str:
        return f"{self.arm}/{request_id}"


class BenchTrace:
    """Writes the records of a comparison between blocks, outside the measured time.

    Args:
        trace: where to; its headers are written.
        draft_hashes: content hash by name of the draft.
        with_tokens: whether steps record the token ids they emitted.
    """

    def __init__(
        self, trace: TraceWriter, *, draft_hashes: Mapping[str, str], with_tokens: bool
    ) -> None:
        self.trace = trace
        self.draft_hashes = draft_hashes
        self.with_tokens = with_tokens
        self.engines: list[TracedEngine] = []

    def over(self, arms: Sequence[BenchArm], tags: Sequence[str]) -> tuple[BenchArm, ...]:
        """Return arms that record steps, with requests tagged by arm and by `tags`."""
        return tuple(self._traced(arms, tags))

    def _traced(self, arms: Sequence[BenchArm], tags: Sequence[str]) -> Iterator[BenchArm]:
        for arm in arms:
            assert isinstance(arm.engine, Engine)
            traced = TracedEngine(
                engine=arm.engine,
                arm=arm.name,
                tags=(arm.name, *tags),
                drafter_hash=self.draft_hashes.get(arm.draft or ""),
            )
            self.engines.append(traced)
            yield replace(arm, engine=traced)

    def write(self) -> None:
        """Write the records of the latest block."""
        for engine in self.engines:
            engine.write(self.trace, with_tokens=self.with_tokens)
