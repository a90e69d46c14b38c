"""Paired comparison: all arms generate for a batch of prompts before the next batch starts.

An arm is one engine over the loaded target: plain decoding, or a draft with one K, tree or
controller. A machine's speed drifts by more than the difference between two arms: other processes,
clocks, caches. Arms measured minutes apart cannot be compared; within a block they share the same
conditions, and the order rotates from block to block so that no arm always goes first.

Looping text flatters every drafter, and a small model's greedy text often ends in a loop. One
batched run of plain decoding finds where each completion first repeats itself, and the comparison
stops there.

The baseline runs on the number of threads with which plain decoding is fastest. A small model waits
longer at every barrier between two threads than the second one saves, and where another process
uses a core the wait becomes the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol, TypeVar, runtime_checkable

import torch

from forerun.control.base import Tree
from forerun.control.config import ControllerName
from forerun.control.named import FixedController
from forerun.drafters.base import Drafter
from forerun.engine.engine import Engine
from forerun.engine.intake import Prompt as EnginePrompt
from forerun.engine.loading import Source, default_controller, load_drafters, tree_method
from forerun.engine.results import RequestOutput
from forerun.measure.bench.config import SCOUT_BATCH, DraftArms
from forerun.sampling.config import SamplingParams
from forerun.theory.acceptance import AcceptanceCounts, first_repeat


@runtime_checkable
class Generator(Protocol):
    """Interface of an engine in comparisons."""

    def generate(
        self, prompts: Sequence[EnginePrompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """Return one finished request per prompt, with shared parameters or one set per prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchArm:
    """One configuration that is compared.

    Attributes:
        num_speculative_tokens: K, 0 for plain decoding; the nodes of a tree.
        tree: shape of every draft; None where drafts are chains or a controller chooses.
        adaptive: whether a controller chooses K at every step, up to `num_speculative_tokens`.
    """

    name: str
    method: str
    num_speculative_tokens: int
    engine: Generator
    draft: str | None = None
    tree: Tree | None = None
    adaptive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt that every arm continues, with its sampling parameters."""

    text: EnginePrompt
    params: SamplingParams


Batch = tuple[Prompt, ...]
"""Prompts that are continued together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Times and outputs of one arm on one batch of prompts."""

    arm: BenchArm
    batch: Batch
    total_s: float
    decode_s: float
    token_ids: tuple[tuple[int, ...], ...]
    acceptance: AcceptanceCounts
    outputs: tuple[RequestOutput, ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def num_decoded(self) -> int:
        return sum(max(0, len(tokens) - 1) for tokens in self.token_ids)

    @property
    def num_decode_steps(self) -> int:
        return self.acceptance.num_steps - len(self.batch)


Block = tuple[Measurement, ...]
"""Measurements of one batch, in the order of the arms."""


def batched(prompts: Iterable[Prompt], size: int) -> Iterator[Batch]:
    remaining = iter(prompts)
    while len(batch := tuple(islice(remaining, size))) == size:
        yield batch


def run_blocks(
    arms: Sequence[BenchArm], batches: Iterable[Batch], clock: Callable[[], float]
) -> Iterator[Block]:
    for index, batch in enumerate(batches):
        shift = index % len(arms)
        order = [*arms[shift:], *arms[:shift]]
        by_name = {arm.name: measure(arm, batch, clock) for arm in order}
        yield tuple(by_name[arm.name] for arm in arms)


def measure(arm: BenchArm, batch: Batch, clock: Callable[[], float]) -> Measurement:
    texts, params = [p.text for p in batch], [p.params for p in batch]
    start_s = clock()
    outputs = arm.engine.generate(texts, params)
    total_s = clock() - start_s
    completions = [output.completions[0] for output in outputs]
    return Measurement(
        arm=arm,
        batch=batch,
        total_s=total_s,
        decode_s=sum(c.total_s - (c.ttft_s or 0.0) for c in completions) / len(batch),
        token_ids=tuple(c.token_ids for c in completions),
        acceptance=sum((c.acceptance for c in completions), AcceptanceCounts()),
        outputs=tuple(outputs),
    )


MIN_TOKENS = 16
"""Shorter completions time little but the prefill; their prompts are passed over."""

MAX_PASSED_OVER = 256
"""Prompts in a row without a completion to time; no further ones are tried."""


def scouted(
    plain: Generator, texts: Sequence[EnginePrompt], params: SamplingParams
) -> Iterator[Prompt]:
    """Yield prompts with `max_tokens` reduced so that plain decoding repeats no 32-gram."""
    num_passed_over = 0  # in a row
    for start in range(0, len(texts), SCOUT_BATCH):
        batch = texts[start : start + SCOUT_BATCH]
        for text, output in zip(batch, plain.generate(batch, params), strict=True):
            length = first_repeat(output.token_ids)
            num_passed_over = 0 if length >= MIN_TOKENS else num_passed_over + 1
            if not num_passed_over:
                yield Prompt(text=text, params=replace(params, max_tokens=length))
        if num_passed_over >= MAX_PASSED_OVER:
            return


WARM_UP_TOKENS = 8


def plain_arm(target: Engine) -> BenchArm:
    return BenchArm(name="plain", method="plain", num_speculative_tokens=0, engine=target)


def draft_arms(target: Engine, wanted: DraftArms, *, dtype: str = "auto") -> tuple[BenchArm, ...]:
    """Return one arm per K and per tree with the same loaded target and draft."""
    drafter = target.with_draft(wanted.draft, wanted.max_nodes, dtype=dtype).drafter
    assert drafter is not None
    for tree in wanted.trees:
        tree_method(drafter, tree)  # refuses a drafter of chains before an engine is made
    shapes: list[tuple[str, int, Tree | None]] = [(f"K={k}", k, None) for k in wanted.ks]
    shapes += [(f"tree={tree}", tree.num_nodes, tree) for tree in wanted.trees]
    return tuple(
        BenchArm(
            name=f"{wanted.name} {label}",
            method=drafter.method,
            num_speculative_tokens=num_nodes,
            engine=target.with_draft(
                drafter, num_nodes, controller=FixedController(tree or num_nodes, drafter.method)
            ),
            draft=wanted.draft,
            tree=tree,
        )
        for label, num_nodes, tree in shapes
    )


def auto_arm(target: Engine, wanted: DraftArms, drafts: Sequence[Source], dtype: str) -> BenchArm:
    """Return the arm that chooses among drafts, which it leaves out if they cannot be loaded."""
    drafter = load_drafters(
        drafts, target.target, target.tokenizer, dtype=dtype, config=target.config, optional=drafts
    )
    return BenchArm(
        name=wanted.name,
        method=drafter.method,
        num_speculative_tokens=wanted.max_nodes,
        engine=build_controlled_engine(target, drafter, wanted.max_nodes, "auto"),
        draft=wanted.draft,
        adaptive=True,
    )


def adaptive_arms(
    target: Engine,
    arms: Sequence[BenchArm],
    controllers: Sequence[ControllerName],
) -> tuple[BenchArm, ...]:
    """Return one arm per draft and controller, up to the draft's largest K."""
    ascending = sorted(arms, key=lambda arm: arm.num_speculative_tokens)
    largest = {arm.draft: arm for arm in ascending if arm.draft is not None and not arm.adaptive}
    return tuple(
        replace(
            arm,
            name=f"{arm.name.rpartition(' ')[0]} {name}",
            engine=_build_adaptive_engine(target, arm, name),
            tree=None,
            adaptive=True,
        )
        for arm in largest.values()
        for name in controllers
    )


def _build_adaptive_engine(target: Engine, arm: BenchArm, name: ControllerName) -> Engine:
    assert isinstance(arm.engine, Engine) and arm.engine.drafter is not None
    return build_controlled_engine(target, arm.engine.drafter, arm.num_speculative_tokens, name)


def build_controlled_engine(
    target: Engine, drafter: Drafter, max_nodes: int, name: ControllerName
) -> Engine:
    """Return an engine whose controller chooses K, as `Engine.load` would build it."""
    config = replace(target.config, controller=name, num_speculative_tokens=max_nodes)
    controller = default_controller(config, drafter, {}, target.target)
    return target.with_draft(drafter, max_nodes, controller=controller)


def warm_up(arms: Sequence[BenchArm], text: EnginePrompt, clock: Callable[[], float]) -> float:
    """Generate twice with every arm, so that no measurement includes initialisation."""
    params = SamplingParams(temperature=0, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
    seconds = 0.0
    for arm in arms:
        arm.engine.generate([text], params)
        start_s = clock()
        arm.engine.generate([text], params)
        seconds += clock() - start_s
    return seconds / WARM_UP_TOKENS


Loaded = TypeVar("Loaded", bound=Generator)

NUM_TOKENS = 8


def on_best_threads(
    load: Callable[[int], Loaded],
    text: str,
    clock: Callable[[], float],
    num_threads: int | None = None,
) -> tuple[Loaded, float]:
    """Load with one thread and with all threads, and keep the engine that decodes faster.

    A runner may fix its threads when it loads; torch has its own number, which is set for the whole
    process and which a runner may lower while it loads.
    """
    found: list[tuple[float, int, Loaded]] = []
    candidates = {1, torch.get_num_threads()} if num_threads is None else {num_threads}
    for candidate in sorted(candidates):
        torch.set_num_threads(candidate)
        engine = load(candidate)
        pace_s = _time_token(engine, text, clock)
        found.append((pace_s, torch.get_num_threads(), engine))
    pace_s, num_torch_threads, best = min(found, key=lambda entry: entry[0])
    torch.set_num_threads(num_torch_threads)
    return best, pace_s


def _time_token(plain: Generator, text: str, clock: Callable[[], float]) -> float:
    """Measure seconds per token of a short completion, excluding a first warm-up run."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    plain.generate([text], params)
    start_s = clock()
    plain.generate([text], params)
    return (clock() - start_s) / NUM_TOKENS
