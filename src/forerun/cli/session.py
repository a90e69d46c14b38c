"""One request from prompt to figures, with its trace."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from forerun.cli.figures import Figures
from forerun.cli.flags import PairFlags
from forerun.cli.threads import use_threads
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.observing import EmittedRecords
from forerun.engine.results import RequestOutput, StreamChunk
from forerun.engine.tracing import request_records
from forerun.sampling.config import SamplingParams
from forerun.theory.record import Json, StepRecord
from forerun.trace.writer import TraceWriter

__all__ = ["Session", "load_engine"]

NOTHING: Mapping[str, Json] = {}


def load_engine(pair: PairFlags, *, num_samples: int) -> Engine:
    """The engine the flags describe, with room for as many samples as one request has."""
    max_batch = min(num_samples, EngineConfig().max_batch)
    config = EngineConfig(
        num_speculative_tokens=pair.k,
        max_batch=max_batch,
        runner=pair.runner,
        num_threads=use_threads(pair.threads),
    )
    engine = Engine.load(
        pair.target, pair.draft_names or None, dtype=pair.dtype, device=pair.device, config=config
    )
    if not pair.profile and pair.controller in ("auto", "fixed"):
        return engine
    from forerun.cli.controlled import controlled  # reading profiles takes modules of its own

    return controlled(engine, pair)


class Session:
    """Runs one request and keeps what happened, so that an interrupted one has figures too."""

    def __init__(
        self,
        engine: Engine,
        *,
        trace: TraceWriter | None,
        trace_tokens: bool,
        drafter_hashes: Mapping[str, str | None] | None = None,
    ) -> None:
        self.engine = engine
        self.trace = trace
        self.trace_tokens = trace_tokens
        self.drafter_hashes = drafter_hashes or {}
        self.records: list[StepRecord] = []
        self.num_prompt_tokens = 0
        self.started_s = self.ended_s = time.perf_counter()
        self.first_s: float | None = None
        self._output: RequestOutput | None = None

    def run(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[StreamChunk]:
        """Yield chunks of all samples as they are decided; `result` is there at the end."""
        self.num_prompt_tokens = len(prompt)
        self.started_s = self.ended_s = time.perf_counter()
        self.engine.observers[:] = [EmittedRecords(self.records.append)]
        request_id = self.engine.add_request(prompt, params)
        try:
            while self.engine.has_unfinished:
                num_before = len(self.records)
                chunks = self.engine.step()
                self.ended_s = time.perf_counter()
                if chunks and self.first_s is None:
                    self.first_s = self.ended_s
                self._trace_steps(self.records[num_before:], chunks)
                yield from chunks
            self._output = self.engine.take_output(request_id)
            self._trace_request(self._output, params)
        finally:
            self.engine.abort(request_id)

    @property
    def result(self) -> RequestOutput:
        """The finished request; only after `run` has ended."""
        assert self._output is not None
        return self._output

    @property
    def figures(self) -> Figures:
        """Of what has happened so far."""
        return Figures.of(
            self.records,
            num_prompt_tokens=self.num_prompt_tokens,
            total_s=self.ended_s - self.started_s,
            ttft_s=None if self.first_s is None else self.first_s - self.started_s,
        )

    def _trace_steps(self, records: Sequence[StepRecord], chunks: Sequence[StreamChunk]) -> None:
        if self.trace is None:
            return
        # A step's records and chunks are of the same samples in the same order.
        for record, chunk in zip(records, chunks, strict=True):
            changes = NOTHING
            if record.num_drafted:
                changes = {"drafter_hash": self.drafter_hashes.get(record.method)}
            if self.trace_tokens:
                changes = {**changes, "token_ids": chunk.token_ids}
            self.trace.add(record, changes)

    def _trace_request(self, output: RequestOutput, params: SamplingParams) -> None:
        if self.trace is None:
            return
        for record in request_records(output, params, with_tokens=self.trace_tokens):
            self.trace.add(record)
