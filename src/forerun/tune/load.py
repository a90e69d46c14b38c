"""Load tests of servers: requests/s, tokens/s, time to first token and time per output token.

A block is a number of requests from so many clients at once; each client sends its next request
when the last one has ended. Blocks are the units of all intervals. All arms answer the same prompts
in blocks of the same index, so that a slower machine slows them all.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
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


class RefusedPrompt(InvalidRequest):
    """A server refuses a request; `place` is that of its prompt in the block."""

    def __init__(self, reason: str, place: int) -> None:
        super().__init__(reason)
        self.place = place


def list_prompts(path: Path | None, *, is_chat: bool) -> dict[str, Prompt]:
    """Return prompts of a file or folder, or the shipped ones, by name.

    Args:
        is_chat: whether texts are sent as messages of a user. Without it a conversation is refused.

    Raises:
        InvalidRequest: there are too few prompts, one is damaged, or one is a conversation.
    """
    if path is None:
        shipped = chat_prompts() if is_chat else held_out_prompts()
        entries = [PromptEntry(where=p.name, text=p.text) for p in neighbours_apart(shipped)]
    else:
        entries = read_prompts(path)
    distinct: dict[str, tuple[str, Prompt]] = {}
    for entry in entries:
        prompt = _build_prompt(entry, is_chat)
        distinct.setdefault(json.dumps(prompt), (entry.where, prompt))
    if len(distinct) < LEAST_PROMPTS:
        raise InvalidRequest(
            f"--prompts {path} has {len(distinct)} different prompts; {LEAST_PROMPTS} are needed, "
            "one of which confirms the choice"
        )
    return dict(distinct.values())


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
        prompts: at least four, by name; every fourth is kept for the final measurement.
        run: number in the first lines, different from run to run.
        marks_all: whether even new prompts have a first line, because the servers ran before.
        left_out: names of prompts that are not dealt, because servers refuse them.

    Raises:
        InvalidRequest: no prompt is left.
    """

    def __init__(
        self,
        prompts: Mapping[str, Prompt],
        run: int,
        *,
        marks_all: bool = False,
        left_out: Collection[str] = (),
    ) -> None:
        self._names: dict[bool, list[str]] = {False: [], True: []}
        for number, name in enumerate(prompts, start=1):
            if name not in left_out:
                self._names[number % LEAST_PROMPTS == 0].append(name)
        if not all(self._names.values()):
            raise InvalidRequest("the server refuses all prompts that choose or all that confirm")
        self._prompts, self._run, self._marks_all = prompts, run, marks_all
        self._dealt: dict[tuple[Load, int, bool], list[tuple[str, Prompt]]] = {}
        self._places = {False: 0, True: 0}

    def deal(self, load: Load, index: int, number: int, *, is_final: bool = False) -> list[Prompt]:
        """Return the prompts of a block, those that chose nothing for a final one."""
        key = load, index, is_final
        if key not in self._dealt:
            first = self._places[is_final]
            self._places[is_final] += number
            self._dealt[key] = [self._pick(n, is_final) for n in range(first, first + number)]
        return [prompt for _, prompt in self._dealt[key]]

    def find_name(self, load: Load, index: int, place: int, is_final: bool) -> str:
        """Return the name of a prompt by its place in a block."""
        return self._dealt[load, index, is_final][place][0]

    def deal_warm_up(self, number: int) -> list[Prompt]:
        """Return prompts for a server that has just started: a short one, with other marks."""
        shortest = min((self._prompts[n] for n in self._names[False]), key=lambda p: len(str(p)))
        return [mark_prompt(shortest, f"{self._run:x}-w{n}") for n in range(number)]

    def _pick(self, place: int, is_final: bool) -> tuple[str, Prompt]:
        names = self._names[is_final]
        name = names[place % len(names)]
        if place < len(names) and not self._marks_all:
            return name, self._prompts[name]
        return name, mark_prompt(self._prompts[name], f"{self._run:x}-{place}{is_final:d}")


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
        unit: index of the first block of the same start of the server where servers run one at a
            time, else of this one; blocks of one unit are not independent.
        answers: in the order of the prompts.
        drafting: counts of the engine; None where it reports none.
    """

    arm: str
    load: Load
    index: int
    unit: int
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
            unit=self.unit,
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
        RefusedPrompt: the server refuses a request.
        InvalidRequest: no answer has two tokens.
        ServerUnavailable: the server fails, hangs, breaks off an answer or sends no token.
    """
    params = replace(params, temperature=load.temperature)
    answers = list[TimedAnswer]()
    executor = ThreadPoolExecutor(load.clients)
    start_s = time.perf_counter()
    try:
        answers.extend(executor.map(lambda prompt: server.ask(prompt, params), prompts))
        wall_s = time.perf_counter() - start_s
    except InvalidRequest as error:
        raise RefusedPrompt(str(error), len(answers)) from error
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
    block = LoadBlock(
        arm=arm, load=load, index=index, unit=index, wall_s=wall_s, answers=(*answers,)
    )
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


def compute_figures(blocks: Sequence[LoadBlock]) -> dict[str, Interval]:
    """Return all figures of an arm.

    Intervals are by bootstrap over the units; with a single one they reach from 0 to infinity.

    Raises:
        ValueError: there is no block.
    """
    if not blocks:
        raise ValueError("there are no blocks to take figures of")
    units, found = defaultdict[int, list[LoadBlock]](list), {}
    for block in blocks:
        units[block.unit].append(block)
    for name, (taken, combined) in LOAD_FIGURES.items():
        samples = [[taken(block) for block in unit] for unit in units.values()]
        statistic = partial(_compute_resample, combined, samples)
        if len(units) == 1:
            found[name] = Interval(estimate=statistic([range(1)]), low=0.0, high=math.inf)
        else:
            found[name] = bootstrap(statistic, [len(units)], seed=0, num_resamples=1000)
    return found


def _compute_resample(
    combined: Combined, samples: Sequence[Sequence[Samples]], groups: Sequence[Sequence[int]]
) -> float:
    return combined([block for unit in groups[0] for block in samples[unit]])


def compare_texts(
    blocks: Sequence[LoadBlock], other: Sequence[LoadBlock]
) -> tuple[int, Interval | None]:
    """Return how many texts of two arms were compared, and the share that is equal."""
    paired = {block.index: block for block in other}
    equal = [
        one.digest == two.digest
        for block in blocks
        if block.index in paired
        for one, two in zip(block.answers, paired[block.index].answers, strict=True)
    ]
    return len(equal), wilson_interval(sum(equal), len(equal)) if equal else None
