"""Paired comparison: all arms generate for a batch of prompts before the next batch starts.

A machine's speed drifts by more than the difference between two arms: other processes, clocks,
caches. Arms measured minutes apart cannot be compared; within a block they share the same
conditions, and the order rotates from block to block so that no arm always goes first.

Looping text flatters every drafter, and a small model's greedy text often ends in a loop. One
batched run of plain decoding finds where each completion first repeats itself, and the comparison
stops there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol, runtime_checkable

from forerun.bench.config import SCOUT_BATCH
from forerun.control.base import Tree
from forerun.engine.results import RequestOutput
from forerun.sampling.config import SamplingParams
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.text import first_repeat

__all__ = [
    "MIN_TOKENS",
    "Batch",
    "BenchArm",
    "Block",
    "Generator",
    "Measurement",
    "Prompt",
    "batched",
    "run_blocks",
    "scouted",
    "within_budget",
]


@runtime_checkable
class Generator(Protocol):
    """Interface of an engine in comparisons."""

    def generate(
        self, prompts: Sequence[str], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """Return one finished request per prompt, with shared parameters or one set per prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchArm:
    """One configuration that is compared.

    Attributes:
        name: how tables call it.
        method: name of the drafter, or "plain".
        num_speculative_tokens: K, 0 for plain decoding; the nodes of a tree.
        engine: what generates.
        draft: name of the draft model, None where there is none.
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
    """A text that every arm continues, with its sampling parameters."""

    text: str
    params: SamplingParams


Batch = tuple[Prompt, ...]
"""Prompts that are continued together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Times and outputs of one arm on one batch of prompts.

    Attributes:
        arm: which.
        batch: what it continued.
        total_s: wall time of the call, prefill included.
        decode_s: time after the first token, prefill excluded; mean over the batch.
        token_ids: what was emitted, per prompt.
        num_prompt_tokens: tokens of all prompts.
        acceptance: drafted and accepted counts of all prompts.
    """

    arm: BenchArm
    batch: Batch
    total_s: float
    decode_s: float
    token_ids: tuple[tuple[int, ...], ...]
    num_prompt_tokens: int
    acceptance: AcceptanceCounts

    @property
    def num_tokens(self) -> int:
        """Number of emitted tokens, including the first token of every prompt."""
        return sum(map(len, self.token_ids))

    @property
    def num_decoded(self) -> int:
        """Number of tokens emitted during `decode_s`, without the first token of every prompt."""
        return sum(max(0, len(tokens) - 1) for tokens in self.token_ids)

    @property
    def num_decode_steps(self) -> int:
        """Number of steps of all prompts after the steps that complete the prefills."""
        return self.acceptance.num_steps - len(self.batch)


Block = tuple[Measurement, ...]
"""Measurements of one batch, in the order of the arms."""


def batched(prompts: Iterable[Prompt], size: int) -> Iterator[Batch]:
    """Yield full batches lazily; an incomplete last batch is dropped."""
    remaining = iter(prompts)
    while len(batch := tuple(islice(remaining, size))) == size:
        yield batch


def run_blocks(
    arms: Sequence[BenchArm], batches: Iterable[Batch], clock: Callable[[], float]
) -> Iterator[Block]:
    """Measure every arm on every batch, and yield one block of measurements per batch.

    Nothing is warmed up here: let every arm generate something before.

    Args:
        arms: what to compare.
        batches: one block each.
        clock: seconds, for example `time.perf_counter`.

    Yields:
        Complete blocks only, so that a caller may stop at any time.
    """
    for index, batch in enumerate(batches):
        shift = index % len(arms)
        order = [*arms[shift:], *arms[:shift]]
        by_name = {arm.name: measure(arm, batch, clock) for arm in order}
        yield tuple(by_name[arm.name] for arm in arms)


def measure(arm: BenchArm, batch: Batch, clock: Callable[[], float]) -> Measurement:
    """Measure one arm on one batch."""
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
        num_prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        acceptance=sum((c.acceptance for c in completions), AcceptanceCounts()),
    )


def within_budget(
    blocks: Iterator[Block], deadline_s: float, clock: Callable[[], float], *, at_least: int = 0
) -> Iterator[Block]:
    """Yield blocks until another one would probably exceed the time budget.

    Args:
        blocks: lazily measured blocks.
        deadline_s: time of the end, on the clock's scale.
        clock: seconds.
        at_least: blocks to measure whatever the time.
    """
    longest_s, num_done = 0.0, 0
    while num_done < at_least or clock() + longest_s < deadline_s:
        start_s = clock()
        block = next(blocks, None)
        if block is None:
            return
        longest_s = max(longest_s, clock() - start_s)
        num_done += 1
        yield block


MIN_TOKENS = 16
"""Shorter completions time little but the prefill; their prompts are passed over."""


def scouted(plain: Generator, texts: Sequence[str], params: SamplingParams) -> Iterator[Prompt]:
    """Yield prompts with `max_tokens` reduced so that plain decoding repeats no 32-gram.

    Lazy: a batch is decoded when its first prompt is asked for.

    Args:
        plain: decodes without a draft.
        texts: prompts.
        params: greedy parameters with `max_tokens` set.
    """
    for start in range(0, len(texts), SCOUT_BATCH):
        batch = texts[start : start + SCOUT_BATCH]
        for text, output in zip(batch, plain.generate(batch, params), strict=True):
            length = first_repeat(output.token_ids)
            if length >= MIN_TOKENS:
                yield Prompt(text=text, params=replace(params, max_tokens=length))
