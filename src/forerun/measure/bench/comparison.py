"""Compares arms over one target at several temperatures and batch sizes, and writes the trace.

A cell is one temperature and one batch size. Cells take turns block by block, so a run that is
interrupted has something to say of each, and a machine that gets slower slows them all.

In order: the exactness check in fp32, the choice of K on calibration prompts, the comparison on
other prompts, copying where the prompt asks for an edit, the drafts again at T=1. The time left
decides how many prompts are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice, pairwise

import torch

from forerun.drafters.config import parse_drafter
from forerun.engine.auto_drafts import with_auto
from forerun.engine.engine import Engine
from forerun.engine.intake import Prompt as EnginePrompt
from forerun.engine.loading import check_draft
from forerun.engine.observing import EmittedRecords
from forerun.engine.results import Completion, RequestOutput, request_records
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
    within_budget,
)
from forerun.measure.bench.config import AUTO, LEAST_BLOCKS, BenchConfig, DemoConfig, DraftArms
from forerun.measure.bench.report import (
    BenchReport,
    CellReport,
    DemoReport,
    ExactnessReport,
    best_arm,
    check_exactness,
    rows_of,
    summarise,
)
from forerun.measure.prompt_files import PromptEntry, neighbours_apart, prompt_ids, shipped_prompts
from forerun.models.tokenizers import Tokenizer
from forerun.plan.costs import DraftCosts
from forerun.provenance import collect, content_hash
from forerun.sampling.config import SamplingParams
from forerun.theory.record import Json, StepRecord
from forerun.trace.files import TraceWriter

THREADS_PROMPT = "The number of threads is chosen by decoding a few tokens after this text."


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Requests and step records of one `generate` call."""

    params: tuple[SamplingParams, ...]
    records: list[StepRecord]
    outputs: list[RequestOutput]


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
        self.calls.append(Call(params=each, records=records, outputs=outputs))
        return outputs

    def write(self, trace: TraceWriter, *, with_tokens: bool) -> None:
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
    """Writes the records of a comparison between blocks, outside the measured time."""

    def __init__(
        self, trace: TraceWriter, *, draft_hashes: Mapping[str, str], with_tokens: bool
    ) -> None:
        self.trace = trace
        self.draft_hashes = draft_hashes
        self.with_tokens = with_tokens
        self.engines: list[TracedEngine] = []

    def over(self, arms: Sequence[BenchArm], tags: Sequence[str]) -> tuple[BenchArm, ...]:
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
        self.costs: dict[str, DraftCosts] = {}
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
        for arm in config.arms:
            named, _ = with_auto([arm.draft], config.target, config.device, dtype, config.engine)
            self.drafts[arm.name] = [str(draft) for draft in named]
            for draft in named:
                check_draft(draft, config.target)
        self.notify("loading models")
        target, _ = on_best_threads(self.target, THREADS_PROMPT, self.clock, wanted)
        self.num_threads = target.config.num_threads
        entries = self.entries or shipped_prompts(target.tokenizer, raw=self.raw)
        self._check_number(entries)
        self.prompts = [prompt_ids(entry, target.tokenizer, raw=self.raw) for entry in entries]
        self.arms = (plain_arm(target), *chain.from_iterable(self._arms_of(target)))
        self.notify("warming up")
        warm_up(self.arms, self.prompts[0], self.clock)

    def _arms_of(self, target: Engine) -> Iterator[Sequence[BenchArm]]:
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

    def run(self, costs: Mapping[str, DraftCosts]) -> None:
        """Measure every arm on every block of prompts and store the results; call `load` before."""
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
        num_done = sum(map(len, self.blocks.values()))
        return f"comparing: {num_done} of {len(self.blocks) * self.config.num_blocks} blocks"

    def report(self) -> BenchReport:
        return BenchReport(
            cells=tuple(
                CellReport.of(
                    blocks, temperature=cell.temperature, batch=cell.batch, costs=self.costs
                )
                for cell, blocks in self.blocks.items()
            ),
            provenance=collect(
                {name: content_hash(name) for name in self.models}, self.num_threads
            ),
            config=self.config,
            num_prompts=len(self.prompts),
        )


# Of the time left when a stage begins; the comparison at T=1 has the rest.
EXACTNESS_SHARE = 0.12
CALIBRATION_SHARE = 0.25
GREEDY_SHARE = 0.55
EDITS_SHARE = 0.4
CALIBRATION_BLOCKS = 4
SCORED_BLOCKS = 12
"""Prompts that should fit; completions are made shorter on a slow machine until they do."""

LOOPS = "the target's greedy text loops at once on nearly every prompt: nothing can be compared"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoArms:
    """Engines of the demonstration, which share one target.

    Attributes:
        drafts: with every draft made for the target, one arm per K and one per tree; chains and
            trees are groups of their own.
    """

    plain: BenchArm
    general: BenchArm
    drafts: tuple[tuple[BenchArm, ...], ...]
    copying: BenchArm
    step_s: float
    num_threads: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A completion with the sources of its tokens for display."""

    prompt: str
    completion: Completion
    tokenizer: Tokenizer


class Demo:
    """Runs the demonstration; after an interrupt the results so far remain available.

    Args:
        prompts: texts to continue; the first `config.num_calibration`, spread out, choose K.
        edits: texts that ask for a piece of themselves with a change, which copying can draft.
    """

    def __init__(
        self,
        config: DemoConfig,
        prompts: Sequence[str],
        edits: Sequence[str],
        *,
        clock: Callable[[], float],
        started_s: float,
        notify: Callable[[str], None],
    ) -> None:
        self.config = config
        self.prompts = neighbours_apart(prompts)
        self.edits = edits
        self.clock = clock
        self.deadline_s = started_s + config.seconds
        self.notify = notify
        self.exactness: ExactnessReport | None = None
        self.calibration: list[Block] = []
        self.blocks: list[Block] = []
        self.edit_blocks: list[Block] = []
        self.sampled_blocks: list[Block] = []
        self.num_threads: int | None = None
        self.example: Example | None = None

    def run(self) -> None:
        """Run all parts; a slow machine exceeds the time budget by a few seconds at most."""
        self.notify("loading models")
        arms = load_arms(self.config, self.prompts[0], self.clock)
        self.num_threads = arms.num_threads
        self.exactness = self._check_exactness(arms.step_s)
        chosen = self._choose_k(arms)
        self._compare((arms.plain, arms.general, *chosen))
        self._compare_edits((arms.plain, arms.copying))
        self._compare_sampled((arms.plain, *self._faster_shapes()))
        self._show_example(best_arm([block[2:] for block in self.blocks]))

    @property
    def has_results(self) -> bool:
        """Whether enough prompts have been measured for a table."""
        return len(self.blocks) >= LEAST_BLOCKS

    def report(self) -> DemoReport:
        """Return the report of the results so far; requires `has_results`."""
        return DemoReport(
            rows=tuple(summarise(self.blocks)),
            edit_rows=rows_of(self.edit_blocks),
            sampled_rows=rows_of(self.sampled_blocks),
            exactness=self.exactness,
            provenance=collect(
                {name: content_hash(name) for name in self.config.models}, self.num_threads
            ),
            config=self.config,
            num_calibration=len(self.calibration),
        )

    def _check_exactness(self, step_s: float) -> ExactnessReport:
        """Check exactness in fp32, where batching changes logits by rounding only."""
        config = self.config
        # Both cases take all prompts one by one in plain decoding, which is most of the work.
        seconds = self._left_s * EXACTNESS_SHARE
        length = fitting(seconds / (2 * config.num_exact * step_s), 8, config.exact_tokens)
        self.notify("loading models in fp32")
        engine = replace(config.engine, num_threads=self.num_threads)
        plain = Engine.load(config.target, dtype="float32", config=engine)
        draft = config.drafts[0]
        speculative = plain.with_draft(draft.draft, draft.ks[-1], dtype="float32")
        self.notify("checking exactness")
        cases = {
            "greedy": SamplingParams(temperature=0, max_tokens=length),
            "at T=1 with a seed": SamplingParams(
                temperature=1, seed=1, max_tokens=length, verification="coupled"
            ),
        }
        return check_exactness(plain, speculative, self.prompts[: config.num_exact], cases)

    def _choose_k(self, arms: DemoArms) -> list[BenchArm]:
        seconds = self._left_s * CALIBRATION_SHARE
        candidates = [arm for group in arms.drafts for arm in group]
        params = self._greedy_within(seconds, candidates, num_blocks=CALIBRATION_BLOCKS)
        prompts = scouted(arms.plain.engine, self._set_aside, params)
        for block in self._timed(candidates, prompts, seconds, "choosing K"):
            self.calibration.append(block)
        if not self.calibration:
            raise InvalidRequest(LOOPS)
        ends = list(accumulate(map(len, arms.drafts), initial=0))
        return [
            best_arm([block[start:end] for block in self.calibration])
            for start, end in pairwise(ends)
        ]

    def _compare(self, arms: Sequence[BenchArm]) -> None:
        """Compare plain decoding, the general draft and each chosen arm at temperature 0."""
        seconds = self._left_s * GREEDY_SHARE
        params = self._greedy_within(seconds, arms, num_blocks=SCORED_BLOCKS)
        prompts = scouted(arms[0].engine, self._scored, params)
        for block in self._timed(arms, prompts, seconds, "comparing at T=0"):
            self.blocks.append(block)
        if not self.has_results:
            raise InvalidRequest(LOOPS)

    def _compare_edits(self, arms: Sequence[BenchArm]) -> None:
        seconds = self._left_s * EDITS_SHARE
        params = self._greedy_within(seconds, arms, num_blocks=SCORED_BLOCKS)
        prompts = scouted(arms[0].engine, self.edits, params)
        for block in self._timed(arms, prompts, seconds, "copying on edits"):
            self.edit_blocks.append(block)

    def _faster_shapes(self) -> list[BenchArm]:
        """Return for every draft of this target its faster arm at temperature 0, chain or tree."""
        compared = [block[2:] for block in self.blocks]
        drafts = dict.fromkeys(m.arm.draft for m in compared[0])
        return [
            best_arm([tuple(m for m in block if m.arm.draft == draft) for block in compared])
            for draft in drafts
        ]

    def _compare_sampled(self, arms: Sequence[BenchArm]) -> None:
        """Compare the faster arms at temperature 1 in the remaining time."""
        longest = max(sum(m.total_s for m in block) for block in self.blocks)
        if LEAST_BLOCKS * longest > self._left_s:
            return
        params = SamplingParams(temperature=1, max_tokens=self.config.max_tokens)
        prompts = [Prompt(text=text, params=params) for text in self._scored]
        for block in self._timed(arms, prompts, self._left_s, "comparing at T=1"):
            self.sampled_blocks.append(block)

    def _greedy_within(
        self, seconds: float, arms: Sequence[BenchArm], *, num_blocks: int
    ) -> SamplingParams:
        """Warm the arms up; return parameters with which `num_blocks` blocks fit into the time."""
        self.notify("warming up")
        pace_s = warm_up(arms, self.prompts[0], self.clock)
        fits = seconds / (num_blocks * pace_s)
        length = fitting(fits, self.config.min_tokens, self.config.max_tokens)
        return SamplingParams(temperature=0, max_tokens=length)

    def _timed(
        self, arms: Sequence[BenchArm], prompts: Iterable[Prompt], seconds: float, stage: str
    ) -> Iterator[Block]:
        """Yield measured blocks within a share of the time, at least LEAST_BLOCKS."""
        blocks = run_blocks(arms, batched(prompts, 1), self.clock)
        end_s = self.clock() + seconds
        self.notify(stage)
        timed = within_budget(blocks, end_s, self.clock, at_least=LEAST_BLOCKS)
        for count, block in enumerate(timed, start=1):
            self.notify(f"{stage}: {count} prompts")
            yield block

    def _show_example(self, arm: BenchArm) -> None:
        """Show the first compared completion with the sources of its tokens."""
        self.notify("writing an example")
        assert isinstance(arm.engine, Engine)
        (prompt,) = self.blocks[0][0].batch
        assert isinstance(prompt.text, str)
        (output,) = arm.engine.generate([prompt.text], prompt.params)
        self.example = Example(
            prompt=prompt.text, completion=output.completions[0], tokenizer=arm.engine.tokenizer
        )

    @property
    def _left_s(self) -> float:
        return max(0.0, self.deadline_s - self.clock())

    @property
    def _set_aside(self) -> Sequence[str]:
        return self.prompts[: self.config.num_calibration]

    @property
    def _scored(self) -> Sequence[str]:
        return self.prompts[self.config.num_calibration :]


def load_arms(config: DemoConfig, text: str, clock: Callable[[], float]) -> DemoArms:
    """Load one target with the fastest number of threads, and one engine per draft and K."""

    def load(num_threads: int) -> Engine:
        engine = replace(config.engine, num_threads=num_threads)
        return Engine.load(config.target, config=engine)

    target, step_s = on_best_threads(load, text, clock, config.num_threads)
    copying = DraftArms(name="copying", draft="suffix", ks=(config.copied_k,))
    return DemoArms(
        plain=plain_arm(target),
        general=draft_arms(target, config.general)[0],
        drafts=tuple(
            group
            for draft in config.drafts
            for group in chains_and_trees(draft_arms(target, draft))
        ),
        copying=draft_arms(target, copying)[0],
        step_s=step_s,
        num_threads=target.config.num_threads,
    )


def chains_and_trees(arms: Sequence[BenchArm]) -> Iterator[tuple[BenchArm, ...]]:
    for has_tree in (False, True):
        group = tuple(arm for arm in arms if (arm.tree is not None) is has_tree)
        if group:
            yield group


def fitting(length: float, low: int, high: int) -> int:
    """Round a number of tokens down and limit it to a range."""
    return max(low, min(int(length), high))
