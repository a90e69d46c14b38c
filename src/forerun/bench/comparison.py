"""Compares arms over one target at several temperatures and batch sizes.

A cell is one temperature and one batch size. Cells take turns block by block, so a run that is
interrupted has something to say of each, and a machine that gets slower slows them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch

from forerun.bench.arms import adaptive_arms, draft_arms, on_best_threads, plain_arm, warm_up
from forerun.bench.compare import BenchArm, Block, Prompt, batched, run_blocks, scouted
from forerun.bench.config import BenchConfig
from forerun.bench.report import BenchReport, CellReport
from forerun.bench.tracing import BenchTrace
from forerun.engine.draft_cards import check_card
from forerun.engine.engine import Engine
from forerun.errors import InvalidRequest
from forerun.plan.costs import DraftCosts
from forerun.provenance import collect, content_hash
from forerun.sampling.config import SamplingParams

__all__ = ["BenchCell", "BenchComparison"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCell:
    """Temperature and batch size of one table of results."""

    temperature: float
    batch: int


class BenchComparison:
    """Runs a comparison; after an interrupt the results so far remain available.

    Args:
        config: what to compare.
        prompts: texts to continue.
        clock: seconds.
        notify: called with a description of every stage.

    Attributes:
        trace: takes every measured request, unless None; set between `load` and `run`.
    """

    def __init__(
        self,
        config: BenchConfig,
        prompts: Sequence[str],
        *,
        clock: Callable[[], float],
        notify: Callable[[str], None],
    ) -> None:
        self.config = config
        self.prompts = prompts
        self.clock = clock
        self.notify = notify
        self.arms: tuple[BenchArm, ...] = ()
        self.trace: BenchTrace | None = None
        self.num_threads: int | None = None
        self.costs: dict[str, DraftCosts] = {}
        self.blocks: dict[BenchCell, list[Block]] = {
            BenchCell(temperature=temperature, batch=batch): []
            for batch in config.batches
            for temperature in config.temperatures
        }

    def load(self) -> None:
        """Load all models, choose the number of threads, and warm up every arm.

        Raises:
            InvalidRequest: there are too few prompts for one block of the largest batch.
        """
        largest = max(self.config.batches)
        if len(self.prompts) < largest:
            raise InvalidRequest(
                f"{len(self.prompts)} prompts do not fill a batch of {largest}; give more prompts"
            )
        for draft in self.config.arms:
            check_card(draft.draft, self.config.target)
        self.notify("loading models")
        dtype, wanted = self.config.dtype, self.config.num_threads
        target, _ = on_best_threads(self.target, self.prompts[0], self.clock, wanted)
        self.num_threads = target.config.num_threads
        drafts = [arm for d in self.config.arms for arm in draft_arms(target, d, dtype=dtype)]
        self.arms = (plain_arm(target), *drafts)
        self.notify("warming up")
        warm_up(self.arms, self.prompts[0], self.clock)

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

    def run(self, costs: Mapping[str, DraftCosts]) -> None:
        """Measure every arm on every block of prompts and store the results; call `load` before.

        Args:
            costs: cost tables by draft, for predictions; drafts without one get none.
        """
        self.costs.update(costs)
        if self.config.controllers:
            adaptive = adaptive_arms(self.plain, self.arms, self.config.controllers, costs)
            warm_up(adaptive, self.prompts[0], self.clock)
            self.arms = (*self.arms, *adaptive)
        waiting = {cell: self.measured(cell) for cell in self.blocks}
        while waiting:
            for cell, blocks in list(waiting.items()):
                self.notify(self.progress)
                block = next(blocks, None)
                if block is None:
                    del waiting[cell]
                else:
                    self.blocks[cell].append(block)
                    if self.trace is not None:
                        self.trace.write()

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
        """Return a text with the number of finished blocks."""
        num_done = sum(map(len, self.blocks.values()))
        return f"comparing: {num_done} of {len(self.blocks) * self.config.num_blocks} blocks"

    def report(self) -> BenchReport:
        """Return the report of the results so far."""
        return BenchReport(
            cells=tuple(
                CellReport.of(
                    blocks, temperature=cell.temperature, batch=cell.batch, costs=self.costs
                )
                for cell, blocks in self.blocks.items()
            ),
            provenance=collect(
                {name: content_hash(name) for name in self.config.models}, self.num_threads
            ),
            config=self.config,
            num_prompts=len(self.prompts),
        )
