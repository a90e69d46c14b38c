"""Demonstration on a shipped target, with plain decoding, a slow draft and fast drafts.

In order: the exactness check in fp32, the choice of K on calibration prompts, the comparison on
other prompts, copying where the prompt asks for an edit, the drafts again at T=1. The time left
decides how many prompts are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from forerun.engine.engine import Engine
from forerun.engine.results import Completion
from forerun.errors import InvalidRequest
from forerun.measure.bench.compare import (
    BenchArm,
    Block,
    Prompt,
    batched,
    draft_arms,
    on_best_threads,
    plain_arm,
    run_blocks,
    scouted,
    warm_up,
    within_budget,
)
from forerun.measure.bench.comparison import neighbours_apart
from forerun.measure.bench.config import LEAST_BLOCKS, DemoConfig, DraftArms
from forerun.measure.bench.report import DemoReport, ExactnessReport, check_exactness
from forerun.measure.bench.summary import best_arm, rows_of, summarise
from forerun.models.tokenizers import Tokenizer
from forerun.provenance import collect, content_hash
from forerun.sampling.config import SamplingParams

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
        """Return the fastest K of every draft, by prompts that are not scored afterwards."""
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
        """Compare drafts that copy from the prompt on prompts that ask for an edit."""
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
