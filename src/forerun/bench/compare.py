"""Paired, interleaved comparison: every arm continues a prompt before the next prompt comes.

A machine's speed drifts by more than the difference between two arms: other tenants, clocks,
caches. Arms measured minutes apart cannot be compared; within a block they share the weather, and
the order rotates from block to block so that none always goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from forerun.engine.results import RequestOutput
from forerun.sampling.config import SamplingParams
from forerun.theory.acceptance import AcceptanceCounts

__all__ = ["Arm", "Block", "Generator", "Measurement", "Prompt", "run_blocks", "within_budget"]


@runtime_checkable
class Generator(Protocol):
    """The part of an engine a comparison needs."""

    def generate(self, prompts: Sequence[str], params: SamplingParams) -> list[RequestOutput]:
        """One finished request per prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One configuration under comparison.

    Attributes:
        name: how tables call it.
        method: name of the drafter, or "plain".
        num_speculative_tokens: K, 0 for plain decoding.
        engine: what generates.
    """

    name: str
    method: str
    num_speculative_tokens: int
    engine: Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What every arm continues in one block."""

    text: str
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One arm on one prompt.

    Attributes:
        arm: which.
        prompt: what it continued.
        total_s: wall time of the call, prefill included.
        decode_s: time after the first token, prefill excluded.
        token_ids: what was emitted.
        acceptance: drafted and accepted counts.
    """

    arm: Arm
    prompt: Prompt
    total_s: float
    decode_s: float
    token_ids: tuple[int, ...]
    acceptance: AcceptanceCounts

    @property
    def num_tokens(self) -> int:
        """Emitted tokens, the first included."""
        return len(self.token_ids)

    @property
    def num_decoded(self) -> int:
        """Tokens emitted during `decode_s`: all but the first, which the prefill yields."""
        return max(0, self.num_tokens - 1)


Block = tuple[Measurement, ...]
"""Measurements of one prompt, in the order of the arms."""


def run_blocks(
    arms: Sequence[Arm], prompts: Iterable[Prompt], clock: Callable[[], float]
) -> Iterator[Block]:
    """Measure every arm on every prompt, one prompt after another.

    Nothing is warmed up here: let every arm generate something before.

    Args:
        arms: what to compare.
        prompts: one block each.
        clock: seconds, for example `time.perf_counter`.

    Yields:
        Complete blocks only, so that a caller may stop at any time.
    """
    for index, prompt in enumerate(prompts):
        shift = index % len(arms)
        order = [*arms[shift:], *arms[:shift]]
        by_name = {arm.name: measure(arm, prompt, clock) for arm in order}
        yield tuple(by_name[arm.name] for arm in arms)


def measure(arm: Arm, prompt: Prompt, clock: Callable[[], float]) -> Measurement:
    """Let one arm continue one prompt."""
    start_s = clock()
    (output,) = arm.engine.generate([prompt.text], prompt.params)
    total_s = clock() - start_s
    completion = output.completions[0]
    return Measurement(
        arm=arm,
        prompt=prompt,
        total_s=total_s,
        decode_s=completion.total_s - completion.ttft_s,
        token_ids=completion.token_ids,
        acceptance=completion.acceptance,
    )


def within_budget(
    blocks: Iterator[Block], deadline_s: float, clock: Callable[[], float], *, at_least: int = 0
) -> Iterator[Block]:
    """Pass blocks on until the next would probably end after the deadline.

    Args:
        blocks: lazily measured blocks.
        deadline_s: when to be done, on the clock's scale.
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
