"""Tries the drafts at hand on a target: half of the prompts choose K, the rest measure it.

To choose K, a request drafts with another one after every four steps, plain steps among them, in
random order: what a step costs with each K, and how far drafts are accepted, is seen in one run.
The figure of a draft is then measured as `forerun bench` does, beside plain decoding of the same
prompts, which had no part in the choice.
"""

from __future__ import annotations

import gc
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from statistics import median

from forerun.control.base import Capacity, Controller, Decision, Plan, RequestState
from forerun.control.named import FixedController
from forerun.drafters.base import Drafter
from forerun.drafters.config import parse_drafter
from forerun.engine.auto_drafts import COPIER, fitting_models
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.errors import ForerunError, InvalidRequest
from forerun.measure.bench.compare import (
    MIN_TOKENS,
    BenchArm,
    Block,
    Prompt,
    batched,
    plain_arm,
    run_blocks,
    warm_up,
)
from forerun.measure.bench.config import LEAST_BLOCKS, RecommendConfig
from forerun.measure.bench.report import MIN_BLOCKS, ArmSummary, rows_of
from forerun.measure.prompt_files import PromptEntry, prompt_ids, shipped_prompts
from forerun.models.catalog import PREFIX, ZOO, ZOO_DRAFTS
from forerun.models.checkpoint import ModelFiles
from forerun.sampling.config import SamplingParams
from forerun.theory.acceptance import AcceptanceCounts, first_repeat
from forerun.theory.record import StepRecord
from forerun.theory.splitmix import INCREMENT, MASK, finalise

DEPTHS = (0, 1, 2, 3, 4, 6, 8)
"""The K that are tried; 0 is a plain step."""
MOST_CACHED = 3
"""Models of the local Hugging Face cache that are tried."""
LEAST_GAIN = 1.05
"""A draft whose speedup is at least this, and surely above 1, is recommended."""
LEAST_PROMPTS = 2 * MIN_BLOCKS
"""Prompts that are tried even beyond the time; half of them choose, half are measured."""
LEAST_STEPS = 8
"""A K that was tried in fewer steps is left out of the choice."""
NUM_HELD = 4
"""Steps with the same K in succession: a step after one with another K takes longer."""
WARM_UP_TOKENS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthFigures:
    """Figures of drafting with one K, on the prompts that choose it.

    Attributes:
        num_speculative_tokens: K.
        acceptance_length: tokens per step.
        step_s: seconds of a step, the median over its numbers of drafted tokens.
        speedup: tokens per second over those of plain steps, prefill left out.
    """

    num_speculative_tokens: int
    acceptance_length: float
    step_s: float
    speedup: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTrial:
    """Result of trying one draft.

    Attributes:
        draft: its name.
        method: how it drafts; None if it could not be loaded.
        num_parameters: of a draft model; None for drafters without one.
        depths: figures of every K that was reached in enough steps.
        measured: the K that was chosen, on the other prompts; None if none could be.
        failure: why the draft cannot be used; None if it can.
    """

    draft: str
    method: str | None = None
    num_parameters: int | None = None
    depths: tuple[DepthFigures, ...] = ()
    measured: ArmSummary | None = None
    failure: str | None = None

    @property
    def expected(self) -> float:
        """The highest speedup of any K on the prompts that choose; 0 if there is none."""
        return max((depth.speedup for depth in self.depths), default=0.0)

    @property
    def pays(self) -> bool:
        """Whether the chosen K is faster than plain decoding on the other prompts."""
        found = self.measured
        return (
            found is not None
            and found.disturbance is None
            and found.num_groups >= MIN_BLOCKS
            and (found.speedup.is_above(1.0) and found.speedup.estimate >= LEAST_GAIN)
        )

    def to_dict(self) -> dict[str, object]:
        return {
            "draft": self.draft,
            "method": self.method,
            "num_parameters": self.num_parameters,
            "depths": [asdict(depth) for depth in self.depths],
            "measured": None if self.measured is None else self.measured.to_dict(),
            "failure": self.failure,
            "pays": self.pays,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The drafts that were tried on a target, the fastest on the prompts that choose first.

    Attributes:
        plain_step_s: median seconds of a plain step.
    """

    target: str
    temperature: float
    num_prompts: int
    plain_step_s: float
    trials: tuple[DraftTrial, ...]

    @property
    def chosen(self) -> DraftTrial | None:
        """The draft that seemed fastest of those that pay; None recommends plain decoding."""
        return next((trial for trial in self.trials if trial.pays), None)

    def to_dict(self) -> dict[str, object]:
        chosen = self.chosen
        return {
            "target": self.target,
            "temperature": self.temperature,
            "num_prompts": self.num_prompts,
            "plain_step_s": self.plain_step_s,
            "recommended": None if chosen is None else chosen.draft,
            "trials": [trial.to_dict() for trial in self.trials],
        }


class _DepthsInTurn(Controller):
    """A controller that plans every K of a list for some steps before any of them again.

    Attributes:
        records: those of all steps since they were last taken.
    """

    def __init__(self, depths: Sequence[int]) -> None:
        self.depths = depths
        self.method = ""
        self.records: list[StepRecord] = []
        self._num_rounds = 0
        self._left: list[int] = []  # K of the next steps, in reverse order

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> Decision:
        if not self._left:
            keys = [finalise((self._num_rounds * 64 + k) * INCREMENT & MASK) for k in self.depths]
            order = sorted(zip(keys, self.depths, strict=True))
            self._left = [k for _, k in reversed(order)]
            self._num_rounds += 1
        return Decision([Plan.chain(self.method, self._left.pop())] * len(states), NUM_HELD)

    def observe(self, records: Sequence[StepRecord]) -> None:
        self.records += records

    def taken(self) -> list[StepRecord]:
        """Return the records of the last request without the steps that read its prompt."""
        found, self.records = self.records, []
        return [record for record in found if not record.num_prefill_rows]


def drafts_at_hand(target: str) -> tuple[str, ...]:
    """Return what can be tried on a target without training or fetching anything.

    These are shipped drafts of a shipped target, or models of the local Hugging Face cache with a
    fitting tokenizer; copying from the text; token recycling; and the target's weights in 4 bits.

    Raises:
        InvalidModel: there is no such target.
    """
    if target.startswith(PREFIX):
        size = target.rpartition("-")[2]
        found = [ZOO_DRAFTS[target]] if target in ZOO_DRAFTS else []
        found += [PREFIX + name for name in ZOO if name.endswith(f"-for-{size}")]
    else:
        found = [str(m.folder) for m in islice(fitting_models(target, "auto"), MOST_CACHED)]
    return tuple(dict.fromkeys((*found, COPIER, "recycling", "self:int4")))


def recommend(
    config: RecommendConfig,
    prompts: Sequence[PromptEntry] | None,
    *,
    raw: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    notify: Callable[[str, float], None],
) -> Recommendation:
    """Try every draft on the prompts, and measure it on those that did not choose its K.

    Args:
        config: what to try, and how.
        prompts: their ends are used where they are too long; None takes the shipped ones.
        raw: continue texts as they are, though the target has a chat template.
        notify: receives what is being done and the share that is done.

    Raises:
        InvalidModel: the target cannot be loaded.
        InvalidRequest: no prompt or no draft can be used, or a setting is out of range.
    """
    missing = _find_missing(config.drafts)
    at_hand = config.drafts or drafts_at_hand(config.target)
    drafts = [draft for draft in at_hand if draft not in missing]
    if not drafts:
        raise InvalidRequest(f"none of the drafts can be used: {'; '.join(missing.values())}")
    notify(f"loading {config.target}", 0.0)
    target = _loaded(config)
    notify("decoding plainly", 0.0)
    prompts = prompts or shipped_prompts(target.tokenizer, raw=raw)
    tasks = _usable(target, prompts, raw, config, clock)
    trials = [DraftTrial(draft=draft, failure=reason) for draft, reason in missing.items()]
    steps: list[StepRecord] = []
    for index, draft in enumerate(drafts):

        def report(share: float, draft: str = draft, index: int = index) -> None:
            notify(f"trying {draft}", (index + share) / len(drafts))

        report(0.0)
        try:
            trial, records = _try(target, draft, tasks, config, clock, report)
        except ForerunError as error:
            if draft in config.drafts:
                trials.append(DraftTrial(draft=draft, failure=str(error)))
            continue
        trials.append(trial)
        steps += records
        gc.collect()  # a draft's weights and KV go before the next is loaded
    if all(trial.failure is not None for trial in trials):
        reasons = "; ".join(f"{trial.draft}: {trial.failure}" for trial in trials)
        raise InvalidRequest(f"none of the drafts can be used: {reasons or ', '.join(drafts)}")
    trials.sort(key=lambda trial: -trial.expected)
    plain = [record.cycle_s for record in steps if not record.k_budget]
    return Recommendation(
        target=config.target,
        temperature=config.temperature,
        num_prompts=len(tasks),
        plain_step_s=median(plain) if plain else math.nan,
        trials=tuple(trials),
    )


def _find_missing(drafts: Sequence[str]) -> dict[str, str]:
    """Return why drafts cannot be found, by name, before anything is loaded or decoded."""
    reasons: dict[str, str] = {}
    for draft in drafts:
        try:
            if parse_drafter(draft) is None:
                ModelFiles.find(draft)
        except ForerunError as error:
            reasons[draft] = str(error)
    return reasons


def _loaded(config: RecommendConfig) -> Engine:
    return Engine.load(
        config.target,
        config=EngineConfig(
            num_speculative_tokens=DEPTHS[-1],
            max_batch=1,
            weights=config.weights,
            num_threads=config.num_threads,
        ),
    )


def _usable(
    target: Engine,
    prompts: Sequence[PromptEntry],
    raw: bool,
    config: RecommendConfig,
    clock: Callable[[], float],
) -> list[Prompt]:
    """Return prompts for the time there is, as token ids, cut at the front where too long.

    Greedy texts end before they begin to loop: a loop is easier to draft than what users read.
    """
    room = target.max_context - config.max_tokens - DEPTHS[-1] - 1
    if room < 1:
        raise InvalidRequest(
            f"the context of the target holds {target.max_context} tokens: {config.max_tokens} new "
            "ones leave no room for a prompt; choose fewer"
        )
    params = SamplingParams(temperature=config.temperature, max_tokens=config.max_tokens)
    tasks: list[Prompt] = []
    began_s = clock()
    for prompt in prompts:
        if not (ids := prompt_ids(prompt, target.tokenizer, raw=raw)[-room:]):
            continue
        [text] = target.generate([ids], params)
        is_greedy = config.temperature == 0.0
        length = first_repeat(text.token_ids) if is_greedy else len(text.token_ids)
        if length >= MIN_TOKENS:
            most = length if is_greedy else config.max_tokens
            tasks.append(Prompt(text=ids, params=replace(params, max_tokens=most)))
        if clock() - began_s > config.budget_s and len(tasks) >= LEAST_PROMPTS:
            break
    if len(tasks) < 2 * LEAST_BLOCKS:
        raise InvalidRequest(
            f"{len(tasks)} of {len(prompts)} prompts are continued by {MIN_TOKENS} tokens or more "
            f"without a loop, and {2 * LEAST_BLOCKS} are needed; give other prompts, more tokens, "
            "or a temperature"
        )
    return tasks


def _try(
    target: Engine,
    draft: str,
    tasks: Sequence[Prompt],
    config: RecommendConfig,
    clock: Callable[[], float],
    report: Callable[[float], None],
) -> tuple[DraftTrial, list[StepRecord]]:
    """Choose K on every other prompt and measure it on the rest.

    Returns the figures, and the records of the steps that chose.
    """
    controller = _DepthsInTurn(DEPTHS)
    engine = target.with_draft(draft, controller=controller)
    drafter = engine.drafter
    assert drafter is not None
    controller.method = drafter.method
    choosing, measured = tasks[0::2], tasks[1::2]
    engine.generate([tasks[0].text], replace(tasks[0].params, max_tokens=WARM_UP_TOKENS))
    controller.taken()
    steps: list[StepRecord] = []
    for num_done, task in enumerate(choosing, start=1):
        engine.generate([task.text], task.params)
        steps += controller.taken()
        report(num_done / len(tasks) / 2)
    depths = tuple(_figures(steps))
    rows: tuple[ArmSummary, ...] = ()
    if depths:
        k = max(depths, key=lambda depth: depth.speedup).num_speculative_tokens
        fixed = target.with_draft(drafter, k, controller=FixedController(k, drafter.method))
        arm = BenchArm(name=draft, method=drafter.method, num_speculative_tokens=k, engine=fixed)
        arms = (plain_arm(target), arm)
        warm_up(arms, tasks[0].text, clock)
        blocks: list[Block] = []
        for block in run_blocks(arms, batched(measured, 1), clock):
            blocks.append(block)
            report(0.5 + len(blocks) / len(measured) / 2)
        rows = rows_of(blocks)
    trial = DraftTrial(
        draft=draft,
        method=drafter.method,
        num_parameters=_count_parameters(drafter, target),
        depths=depths,
        measured=rows[1] if rows else None,
    )
    return trial, steps


def _count_parameters(drafter: Drafter, target: Engine) -> int | None:
    """Return the parameters of a draft model; None for a drafter that reads the target's own."""
    model = drafter.model
    return None if model is None or model is target.target else model.num_parameters


def _figures(records: Sequence[StepRecord]) -> Iterable[DepthFigures]:
    """Yield the figures of every K that was tried in enough steps."""
    plain_s = _measure_depth(records, 0)[1]
    for k in DEPTHS[1:]:
        if sum(record.k_budget == k for record in records) >= LEAST_STEPS and plain_s > 0.0:
            tokens, step_s = _measure_depth(records, k)
            yield DepthFigures(
                num_speculative_tokens=k,
                acceptance_length=tokens,
                step_s=step_s,
                speedup=tokens * plain_s / step_s,
            )


def _measure_depth(records: Sequence[StepRecord], k: int) -> tuple[float, float]:
    """Return tokens per step with K, and seconds of such a step.

    A position counts as accepted or not in every step whose K reached it, also where the drafter
    proposed less: the tokens per step are 1 + the sum of these shares. Seconds are the medians by
    number of drafted tokens, weighted by how often a step with this K drafts so many.
    """
    counts = AcceptanceCounts()
    for record in records:
        counts.add(record.k_budget, record.num_accepted)
    tokens = 1.0 + sum(counts.acceptance_rate_per_position[:k])
    # A step whose drafter found nothing takes longer than a plain one.
    times: dict[tuple[int, bool], list[float]] = defaultdict(list)
    for record in records:
        times[record.num_drafted, record.k_budget > 0].append(record.cycle_s)
    drafted = [(record.num_drafted, k > 0) for record in records if record.k_budget == k]
    middle = {kind: median(times[kind]) for kind in set(drafted)}
    return tokens, sum(middle[kind] for kind in drafted) / len(drafted) if drafted else 0.0
