"""Load tests of servers: requests/s, tokens/s, time to first token and time per output token.

A block is a number of requests from so many clients at once; each client sends its next request
when the last one has ended. Blocks are the units of all intervals. All arms answer the same prompts
in blocks of the same index, so that a slower machine slows them all.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path

from forerun.errors import InvalidRequest
from forerun.measure.prompt_files import PromptEntry, neighbours_apart, plain_text, read_prompts
from forerun.models.catalog import chat_prompts, held_out_prompts
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import Interval, bootstrap, quantile, wilson_interval
from forerun.tune.arms import Load
from forerun.tune.drafting import DraftingCounts
from forerun.tune.race import BlockTimes
from forerun.tune.server import MeasuredServer, Prompt, TimedAnswer

LEAST_PROMPTS = 4
"""Of so many prompts one is kept for the final measurement."""


def list_prompts(path: Path | None, *, is_chat: bool) -> list[Prompt]:
    """Return prompts of a file or folder, or the shipped ones.

    Args:
        is_chat: whether texts are sent as messages of a user. Without it a conversation is refused.

    Raises:
        InvalidRequest: there are too few prompts, one is damaged, or one is a conversation.
    """
    if path is None:
        shipped = chat_prompts() if is_chat else held_out_prompts()
        texts = neighbours_apart([prompt.text for prompt in shipped])
        entries = [PromptEntry(where="shipped", text=text) for text in texts]
    else:
        entries = read_prompts(path)
    prompts = [_build_prompt(entry, is_chat) for entry in entries]
    distinct = list({json.dumps(prompt): prompt for prompt in prompts}.values())
    if len(distinct) < LEAST_PROMPTS:
        raise InvalidRequest(
            f"--prompts {path} has {len(distinct)} different prompts; {LEAST_PROMPTS} are needed, "
            "one of which confirms the choice"
        )
    return distinct


def _build_prompt(entry: PromptEntry, is_chat: bool) -> Prompt:
    if not is_chat:
        return plain_text(entry)
    if entry.text is not None:
        return ({"role": "user", "content": entry.text},)
    is_answered = entry.messages[-1]["role"] == "assistant"
    return entry.messages[:-1] if is_answered else entry.messages


class PromptDeck:
    """Deals the prompts of blocks: the same to all arms, and none twice while there are others.

    A prompt that is used again has a first line that no other has, so that no server finds it in
    its prefix cache. The order of the first calls decides which block has which prompts, so an
    interrupted run that asks for its blocks in the order of their records has the same ones.

    Args:
        prompts: at least four; every fourth is kept for the final measurement.
        run: number in the first lines, different from run to run.
        marks_all: whether even new prompts have a first line, because the servers ran before.
    """

    def __init__(self, prompts: Sequence[Prompt], run: int, *, marks_all: bool = False) -> None:
        self._final = tuple(prompts[LEAST_PROMPTS - 1 :: LEAST_PROMPTS])
        self._choosing = tuple(p for n, p in enumerate(prompts, 1) if n % LEAST_PROMPTS)
        self._run, self._marks_all = run, marks_all
        self._dealt: dict[tuple[Load, int, bool], list[Prompt]] = {}
        self._places = {False: count(), True: count()}

    def deal(self, load: Load, index: int, number: int, *, is_final: bool = False) -> list[Prompt]:
        """Return the prompts of a block, those that chose nothing for a final one."""
        key = load, index, is_final
        if key not in self._dealt:
            prompts = self._final if is_final else self._choosing
            places = islice(self._places[is_final], number)
            self._dealt[key] = [self._pick(prompts, place, is_final) for place in places]
        return self._dealt[key]

    def deal_warm_up(self, number: int) -> list[Prompt]:
        """Return prompts for a server that has just started: one that is measured last."""
        return [mark_prompt(self._choosing[-1], f"{self._run:x}-w{n}") for n in range(number)]

    def _pick(self, prompts: Sequence[Prompt], place: int, is_final: bool) -> Prompt:
        prompt = prompts[place % len(prompts)]
        is_new = place < len(prompts) and not self._marks_all
        return prompt if is_new else mark_prompt(prompt, f"{self._run:x}-{place}{is_final:d}")


def mark_prompt(prompt: Prompt, mark: str) -> Prompt:
    """Return a prompt with a first line that makes it different."""
    if isinstance(prompt, str):
        return f"# {mark}\n{prompt}"
    first, *others = prompt
    return ({**first, "content": f"# {mark}\n{first['content']}"}, *others)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBlock:
    """Times and counts of one block of requests to one arm.

    Attributes:
        index: number of the block at its load; blocks of several arms with one index are paired.
        answers: in the order of the prompts.
        drafting: counts of the engine; None where it reports none.
    """

    arm: str
    load: Load
    index: int
    wall_s: float
    answers: tuple[TimedAnswer, ...]
    drafting: DraftingCounts | None = None

    @property
    def num_tokens(self) -> int:
        """Output tokens of all answers."""
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def times(self) -> BlockTimes:
        """Tokens and seconds, which the race compares."""
        return BlockTimes(
            arm=self.arm,
            load=self.load,
            index=self.index,
            num_tokens=self.num_tokens,
            wall_s=self.wall_s,
        )

    @property
    def ttft_s(self) -> list[float]:
        """Seconds to the first token of every request that has one."""
        return [answer.ttft_s for answer in self.answers if answer.ttft_s is not None]

    @property
    def tpot_s(self) -> list[float]:
        """Seconds per output token after the first, of every request that has two."""
        return [
            (answer.total_s - answer.ttft_s) / (answer.num_tokens - 1)
            for answer in self.answers
            if answer.ttft_s is not None and answer.num_tokens > 1
        ]


def count_requests(load: Load) -> int:
    """Return the number of requests of a block: two per client, and at least three."""
    return max(3, 2 * load.clients)


def measure_load(
    server: MeasuredServer,
    prompts: Sequence[Prompt | Sequence[int]],
    params: SamplingParams,
    *,
    arm: str,
    load: Load,
    index: int,
) -> LoadBlock:
    """Measure one block of requests at the temperature of its load.

    After an error other requests may still run: closing the server ends them.

    Raises:
        InvalidRequest: the server refuses a request, or no answer has two tokens.
        ServerUnavailable: the server fails, hangs, breaks off an answer or sends no token.
    """
    params = replace(params, temperature=load.temperature)
    executor = ThreadPoolExecutor(load.clients)
    start_s = time.perf_counter()
    try:
        answers = tuple(executor.map(lambda prompt: server.ask(prompt, params), prompts))
        wall_s = time.perf_counter() - start_s
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
    block = LoadBlock(arm=arm, load=load, index=index, wall_s=wall_s, answers=answers)
    if not block.tpot_s:
        raise InvalidRequest(
            f"none of {len(prompts)} answers of {arm} has two tokens, so there is no time per "
            "token; give other prompts, or a larger --max-tokens"
        )
    return block


Samples = Sequence[float]
Combined = Callable[[Sequence[Samples]], float]


def _compute_rate(samples: Sequence[Samples]) -> float:
    """Return a rate from counts and seconds of several blocks."""
    return sum(count for count, _ in samples) / sum(seconds for _, seconds in samples)


def _share_of_all(share: float) -> Combined:
    return lambda samples: quantile(sorted(value for block in samples for value in block), share)


LOAD_FIGURES: Mapping[str, tuple[Callable[[LoadBlock], Samples], Combined]] = {
    "requests_per_s": (lambda block: (len(block.answers), block.wall_s), _compute_rate),
    "tokens_per_s": (lambda block: (block.num_tokens, block.wall_s), _compute_rate),
    "ttft_median_s": (lambda block: block.ttft_s, _share_of_all(0.5)),
    "ttft_p95_s": (lambda block: block.ttft_s, _share_of_all(0.95)),
    "tpot_median_s": (lambda block: block.tpot_s, _share_of_all(0.5)),
    "tpot_p95_s": (lambda block: block.tpot_s, _share_of_all(0.95)),
}
"""Figures by name: what is taken of a block, and how blocks are combined."""


def compute_figures(
    blocks: Sequence[LoadBlock], other: Sequence[LoadBlock] | None = None
) -> dict[str, Interval]:
    """Return all figures of an arm, or their ratios to those of another arm.

    Intervals are by bootstrap over the blocks, for a ratio over those that both have, paired by
    index; with a single block an interval reaches from 0 to infinity.

    Raises:
        ValueError: there is no block, or none that both have.
    """
    pairs = _match_blocks(blocks, blocks if other is None else other)
    if not pairs:
        raise ValueError("there are no blocks to take figures of")
    found = {}
    for name, (taken, combined) in LOAD_FIGURES.items():
        sides = [[taken(block) for block in side] for side in zip(*pairs, strict=True)]
        statistic = partial(_compute_resample, combined, sides[: 1 if other is None else 2])
        if len(pairs) == 1:
            found[name] = Interval(estimate=statistic([range(1)]), low=0.0, high=math.inf)
        else:
            found[name] = bootstrap(statistic, [len(pairs)], seed=0, num_resamples=1000)
    return found


def _match_blocks(
    blocks: Sequence[LoadBlock], other: Sequence[LoadBlock]
) -> list[tuple[LoadBlock, LoadBlock]]:
    """Return the blocks of one load of two arms that have the same index, in its order."""
    first, second = ({block.index: block for block in each} for each in (blocks, other))
    return [(first[index], second[index]) for index in sorted(first.keys() & second.keys())]


def _compute_resample(
    combined: Combined, sides: Sequence[Sequence[Samples]], groups: Sequence[Sequence[int]]
) -> float:
    value, *below = (combined([side[n] for n in groups[0]]) for side in sides)
    return value / below[0] if below else value


def compare_texts(
    blocks: Sequence[LoadBlock], other: Sequence[LoadBlock]
) -> tuple[int, Interval | None]:
    """Return how many texts of two arms were compared, and the share that is equal."""
    equal = [
        one.digest == two.digest
        for block, paired in _match_blocks(blocks, other)
        for one, two in zip(block.answers, paired.answers, strict=True)
    ]
    return len(equal), wilson_interval(sum(equal), len(equal)) if equal else None
