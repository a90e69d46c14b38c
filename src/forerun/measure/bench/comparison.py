"""Compares arms over one target at several temperatures and batch sizes, and writes the trace.

A cell is one temperature and one batch size. Cells take turns block by block, so a run that is
interrupted has something to say of each, and a machine that gets slower slows them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

import torch

from forerun.drafters.config import AUTO, parse_drafter
from forerun.engine.auto_drafts import with_auto
from forerun.engine.engine import Engine
from forerun.engine.intake import Prompt as EnginePrompt
from forerun.engine.loading import check_draft
from forerun.engine.observing import EmittedRecords
from forerun.engine.results import RequestOutput, request_records
from forerun.errors import InvalidRequest
from forerun.measure.bench.compare import (
    BenchArm,
    Block,
    Prompt,
    adaptive_arms,
    auto_arm,
    batched,
    draft_arms,
    on_best_threads,
    plain_arm,
    run_blocks,
    scouted,
    warm_up,
)
from forerun.measure.bench.config import LEAST_BLOCKS, BenchConfig
from forerun.measure.bench.report import BenchReport, CellReport
from forerun.measure.prompt_files import PromptEntry, prompt_ids, shipped_prompts
from forerun.models.checkpoint import ModelFiles
from forerun.provenance import collect, content_hash
from forerun.sampling.config import SamplingParams
from forerun.theory.record import Json, StepRecord
from forerun.trace.files import TraceWriter

THREADS_PROMPT = "The number of threads is chosen by decoding a few tokens after this text."


Call = tuple[tuple[SamplingParams, ...], list[StepRecord], list[RequestOutput]]
"""Parameters, step records and outputs of one `generate` call."""


@dataclass(slots=True, kw_only=True, eq=False)
class TracedEngine:
    """Engine wrapper that keeps step records in memory until the measurement is over."""

    engine: Engine
    arm: str
    tags: tuple[str, ...]
    drafter_hash: str | None
    calls: list[Call] = field(default_factory=list)

    def generate(
        self, prompts: Sequence[EnginePrompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        each = (params,) * len(prompts) if isinstance(params, SamplingParams) else tuple(params)
        records: list[StepRecord] = []
        observer = EmittedRecords(records.append)
        self.engine.observers.append(observer)
        try:
            outputs = self.engine.generate(prompts, each)
        finally:
            self.engine.observers.remove(observer)
        self.calls.append((each, records, outputs))
        return outputs

    def write(self, trace: TraceWriter) -> None:
        for asked, records, outputs in self.calls:
            for record in records:
                changes: Mapping[str, Json] = {
                    "request_id": self._name(record.request_id),
                    "drafter_hash": self.drafter_hash if record.num_drafted else None,
                }
                trace.add(record, changes)
            for output, params in zip(outputs, asked, strict=True):
                for request in request_records(output, params, self.tags):
                    trace.add(request, {"request_id": self._name(request.request_id)})
        self.calls.clear()

    def _name(self, request_id: str) -> str:
        return f"{self.arm}/{request_id}"


class BenchTrace:
    """Writes the records of a comparison between blocks, outside the measured time."""

    def __init__(self, trace: TraceWriter, draft_hashes: Mapping[str, str]) -> None:
        self.trace = trace
        self.draft_hashes = draft_hashes
        self.engines: list[TracedEngine] = []

    def over(self, arms: Sequence[BenchArm], tags: Sequence[str]) -> tuple[BenchArm, ...]:
        """Return the arms with engines whose steps are kept until `write`."""
        traced = []
        for arm in arms:
            assert isinstance(arm.engine, Engine)
            engine = TracedEngine(
                engine=arm.engine,
                arm=arm.name,
                tags=(arm.name, *tags),
                drafter_hash=self.draft_hashes.get(arm.draft or ""),
            )
            self.engines.append(engine)
            traced.append(replace(arm, engine=engine))
        return tuple(traced)

    def write(self) -> None:
        """Write the records of the latest block."""
        for engine in self.engines:
            engine.write(self.trace)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCell:
    """Temperature and batch size of one table of results."""

    temperature: float
    batch: int


class BenchComparison:
    """Runs a comparison; after an interrupt the results so far remain available.

    Args:
        prompts: None takes the shipped ones, of the kind that the target reads.
        raw: continue texts as they are, though the target has a chat template.
    """

    def __init__(
        self,
        config: BenchConfig,
        prompts: Sequence[PromptEntry] | None,
        *,
        clock: Callable[[], float],
        notify: Callable[[str], None],
        raw: bool = False,
    ) -> None:
        self.config = config
        self.entries = prompts
        self.raw = raw
        self.prompts: list[list[int]] = []
        self.clock = clock
        self.notify = notify
        self.arms: tuple[BenchArm, ...] = ()
        self.drafts: dict[str, list[str]] = {}
        self.trace: BenchTrace | None = None
        self.num_threads: int | None = None
        self.blocks: dict[BenchCell, list[Block]] = {
            BenchCell(temperature=temperature, batch=batch): []
            for batch in config.batches
            for temperature in config.temperatures
        }

    def load(self) -> None:
        """Load all models, choose the number of threads, and warm up every arm."""
        if self.entries is not None:
            self._check_number(self.entries)  # before models are loaded
        config, dtype, wanted = self.config, self.config.dtype, self.config.num_threads
        files = ModelFiles.open(config.target)
        for arm in config.arms:
            named, _ = with_auto([arm.draft], files, config.device, dtype, config.engine)
            self.drafts[arm.name] = [str(draft) for draft in named]
            for draft in named:
                check_draft(draft, config.target)
        self.notify("loading models")
        target, _ = on_best_threads(self.target, THREADS_PROMPT, self.clock, wanted)
        self.num_threads = target.config.num_threads
        if self.entries is None:
            self.entries = shipped_prompts(target.tokenizer, raw=self.raw)
            self._check_number(self.entries)
        self.prompts = [prompt_ids(e, target.tokenizer, raw=self.raw) for e in self.entries]
        self.arms = (plain_arm(target), *chain.from_iterable(self._load_arms(target)))
        self.notify("warming up")
        warm_up(self.arms, self.prompts[0], self.clock)

    def _load_arms(self, target: Engine) -> Iterator[Sequence[BenchArm]]:
        """Yield the arms of every draft, and the one of "auto"."""
        for wanted in self.config.arms:
            drafts = self.drafts[wanted.name]
            if wanted.draft == AUTO:
                yield [auto_arm(target, wanted, drafts, self.config.dtype)]
            else:
                own = replace(wanted, draft=drafts[0])
                yield draft_arms(target, own, dtype=self.config.dtype)

    @property
    def models(self) -> list[str]:
        """Names of all models, without drafters that have no files; available after `load`."""
        drafts = dict.fromkeys(chain.from_iterable(self.drafts.values()))
        return [self.config.target, *(name for name in drafts if parse_drafter(name) is None)]

    def _check_number(self, entries: Sequence[PromptEntry]) -> None:
        if len(entries) < (largest := max(self.config.batches)):
            raise InvalidRequest(
                f"{len(entries)} prompts do not fill a batch of {largest}; give more prompts"
            )

    @property
    def device(self) -> torch.device:
        """Device of the target; available after `load`."""
        return self.plain.target.device

    @property
    def plain(self) -> Engine:
        """Engine of the plain decoding arm; available after `load`."""
        engine = self.arms[0].engine
        assert isinstance(engine, Engine)
        return engine

    def target(self, num_threads: int) -> Engine:
        """Engine over the target without a draft."""
        config = self.config
        engine = replace(config.engine, num_threads=num_threads)
        return Engine.load(config.target, dtype=config.dtype, device=config.device, config=engine)

    def add_controllers(self) -> None:
        """Add and warm up the arms whose K a controller chooses; call `load` before."""
        adaptive = adaptive_arms(self.plain, self.arms, self.config.controllers)
        warm_up(adaptive, self.prompts[0], self.clock)
        self.arms = (*self.arms, *adaptive)

    def run(self, end_s: float = math.inf) -> None:
        """Measure every arm on every block of prompts and store the results; call `load` before.

        Args:
            end_s: time on the clock after which no round of cells begins, unless a cell has too few
                blocks for an interval.
        """
        waiting = {cell: self.measured(cell) for cell in self.blocks}
        while waiting and (self.clock() < end_s or not self._has_enough):
            for cell, blocks in list(waiting.items()):
                self.notify(self.progress)
                block = next(blocks, None)
                if block is None:
                    del waiting[cell]
                else:
                    self.blocks[cell].append(block)
                    if self.trace is not None:
                        self.trace.write()

    @property
    def _has_enough(self) -> bool:
        return min(map(len, self.blocks.values())) >= LEAST_BLOCKS

    def measured(self, cell: BenchCell) -> Iterator[Block]:
        """Yield the blocks of one cell as they are measured."""
        batches = batched(self.prompts_at(cell.temperature), cell.batch)
        arms = self.arms
        if self.trace is not None:
            arms = self.trace.over(arms, (f"T={cell.temperature:g}", f"batch={cell.batch}"))
        return islice(run_blocks(arms, batches, self.clock), self.config.num_blocks)

    def prompts_at(self, temperature: float) -> Iterable[Prompt]:
        """Return prompts with parameters; greedy completions end before they become repetitive."""
        params = SamplingParams(temperature=temperature, max_tokens=self.config.max_tokens)
        if temperature == 0:
            return scouted(self.arms[0].engine, self.prompts, params)
        return [Prompt(text=text, params=params) for text in self.prompts]

    @property
    def progress(self) -> str:
        num_done = sum(map(len, self.blocks.values()))
        return f"comparing: {num_done} of {len(self.blocks) * self.config.num_blocks} blocks"

    def report(self) -> BenchReport:
        return BenchReport(
            cells=tuple(
                CellReport.of(blocks, temperature=cell.temperature, batch=cell.batch)
                for cell, blocks in self.blocks.items()
            ),
            provenance=collect(
                {name: content_hash(name) for name in self.models}, self.num_threads
            ),
            config=self.config,
            num_prompts=len(self.prompts),
        )
