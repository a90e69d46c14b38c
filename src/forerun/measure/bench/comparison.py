"""Compares arms over one target at several temperatures and batch sizes, and writes the trace.

A cell is one temperature and one batch size. Cells take turns block by block, so a run that is
interrupted has something to say of each, and a machine that gets slower slows them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import torch

from forerun.drafters.config import AUTO, parse_drafter
from forerun.engine.auto_drafts import with_auto
from forerun.engine.engine import Engine
from forerun.engine.loading import check_draft
from forerun.engine.observing import EmittedRecords
from forerun.engine.results import request_records
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


class BenchTrace:
    """Writes the records of a comparison between blocks, outside the measured time."""

    def __init__(self, trace: TraceWriter, draft_hashes: Mapping[str, str]) -> None:
        self.trace = trace
        self.draft_hashes = draft_hashes
        self._records: dict[str, list[StepRecord]] = {}

    def follow(self, arms: Sequence[BenchArm]) -> None:
        """Keep the step records of the arms' engines in memory until `write`."""
        for arm in arms:
            assert isinstance(arm.engine, Engine)
            kept = self._records[arm.name] = []
            arm.engine.observers.append(EmittedRecords(kept.append))

    def write(self, block: Block, tags: Sequence[str]) -> None:
        """Write the records of a block; those of steps that were not measured are dropped."""
        for measurement in block:
            arm, outputs = measurement.arm, measurement.outputs
            names = {output.request_id: f"{arm.name}/{output.request_id}" for output in outputs}
            drafter_hash = self.draft_hashes.get(arm.draft or "")
            for record in self._records[arm.name]:
                if record.request_id in names:
                    changes: Mapping[str, Json] = {
                        "request_id": names[record.request_id],
                        "drafter_hash": drafter_hash if record.num_drafted else None,
                    }
                    self.trace.add(record, changes)
            self._records[arm.name].clear()
            for output, prompt in zip(outputs, measurement.batch, strict=True):
                for request in request_records(output, prompt.params, (arm.name, *tags)):
                    self.trace.add(request, {"request_id": names[output.request_id]})


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
        if self.trace is not None:
            self.trace.follow(self.arms)
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
                        tags = (f"T={cell.temperature:g}", f"batch={cell.batch}")
                        self.trace.write(block, tags)

    @property
    def _has_enough(self) -> bool:
        return min(map(len, self.blocks.values())) >= LEAST_BLOCKS

    def measured(self, cell: BenchCell) -> Iterator[Block]:
        """Yield the blocks of one cell as they are measured."""
        batches = batched(self.prompts_at(cell.temperature), cell.batch)
        return islice(run_blocks(self.arms, batches, self.clock), self.config.num_blocks)

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
