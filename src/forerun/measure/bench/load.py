"""Load tests of servers: requests/s, tokens/s, time to first token and time per output token.

A block is a number of requests from so many clients at once; each client sends its next request
when the last one has ended. Blocks are the units of all intervals. Where two endpoints are
compared, both answer the same prompts block by block, so that a slower machine slows them both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from forerun.errors import InvalidRequest
from forerun.measure.bench.config import LEAST_BLOCKS
from forerun.measure.bench.endpoint import MeasuredServer, TimedAnswer
from forerun.measure.bench.report import warn_of_few
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import Interval, bootstrap, quantile, wilson_interval

WARM_UP_TOKENS = 8

Prompts = Sequence[str | Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBlock:
    """Times and texts of one block of requests to one endpoint.

    Attributes:
        index: number of the block; blocks of several endpoints with one index are paired.
        completions: answers, in the order of the prompts.
    """

    endpoint: str
    concurrency: int
    index: int
    wall_s: float
    completions: tuple[TimedAnswer, ...]

    @property
    def ttft_s(self) -> list[float]:
        """Seconds to the first token of every request that has one."""
        return [c.ttft_s for c in self.completions if c.ttft_s is not None]

    @property
    def tpot_s(self) -> list[float]:
        """Seconds per output token after the first, of every request that has two."""
        return [
            (c.total_s - c.ttft_s) / (c.num_tokens - 1)
            for c in self.completions
            if c.ttft_s is not None and c.num_tokens > 1
        ]

    def to_dict(self) -> dict[str, object]:
        return {
            "endpoint": self.endpoint,
            "concurrency": self.concurrency,
            "index": self.index,
            "wall_s": self.wall_s,
            "requests": [
                {"ttft_s": c.ttft_s, "total_s": c.total_s, "num_tokens": c.num_tokens}
                for c in self.completions
            ],
        }


def load_prompts(texts: Sequence[str], first: int, num_prompts: int, run: int) -> list[str]:
    """Return prompts that differ from all others of this run and of other runs.

    The first line of each holds the numbers of the run and of the request, so that no server finds
    a prompt in its prefix cache.
    """
    places = range(first, first + num_prompts)
    return [f"# {run:x}-{place}\n{texts[place % len(texts)]}" for place in places]


def measure_load(
    server: MeasuredServer,
    prompts: Prompts,
    params: SamplingParams,
    *,
    endpoint: str,
    concurrency: int,
    index: int,
) -> LoadBlock:
    """Measure one block of requests."""
    executor = ThreadPoolExecutor(concurrency)
    start_s = time.perf_counter()
    try:
        answers = list(executor.map(lambda prompt: server.ask(prompt, params), prompts))
        wall_s = time.perf_counter() - start_s
    finally:  # after an error the server is closed, which ends the other requests
        executor.shutdown(wait=False, cancel_futures=True)
    block = LoadBlock(
        endpoint=endpoint,
        concurrency=concurrency,
        index=index,
        wall_s=wall_s,
        completions=tuple(answers),
    )
    if not block.tpot_s:
        raise InvalidRequest(
            f"none of {len(prompts)} answers of {endpoint} has two tokens with their count, so "
            "there is no time per token; raise --max-tokens, or give --ignore-eos"
        )
    return block


def run_load(
    servers: Mapping[str, MeasuredServer],
    prompts_of: Callable[[int, int], Sequence[str]],
    params: SamplingParams,
    *,
    num_requests: Mapping[int, int],
    num_blocks: int,
) -> Iterator[LoadBlock]:
    """Yield measured blocks: of every number of clients all endpoints in turn, then again."""
    short = replace(params, max_tokens=min(WARM_UP_TOKENS, params.max_tokens or WARM_UP_TOKENS))
    names, place = list(servers), 0
    most = max(num_requests)
    for name in names:
        prompts = prompts_of(place, most)
        measure_load(servers[name], prompts, short, endpoint=name, concurrency=most, index=-1)
    place += most
    for index in range(num_blocks):
        for concurrency, number in num_requests.items():
            prompts = prompts_of(place, number)
            place += number
            shift = index % len(names)
            for name in (*names[shift:], *names[:shift]):
                yield measure_load(
                    servers[name],
                    prompts,
                    params,
                    endpoint=name,
                    concurrency=concurrency,
                    index=index,
                )


Samples = Sequence[float]


def rate(samples: Sequence[Samples]) -> float:
    """Return a rate from counts and seconds of several blocks."""
    return sum(count for count, _ in samples) / sum(seconds for _, seconds in samples)


def _share_of_all(share: float) -> Callable[[Sequence[Samples]], float]:
    return lambda samples: quantile(sorted(value for block in samples for value in block), share)


LOAD_FIGURES: Mapping[
    str, tuple[Callable[[LoadBlock], Samples], Callable[[Sequence[Samples]], float]]
] = {
    "requests_per_s": (lambda block: (len(block.completions), block.wall_s), rate),
    "tokens_per_s": (
        lambda block: (sum(c.num_tokens for c in block.completions), block.wall_s),
        rate,
    ),
    "ttft_median_s": (lambda block: block.ttft_s, _share_of_all(0.5)),
    "ttft_p95_s": (lambda block: block.ttft_s, _share_of_all(0.95)),
    "tpot_median_s": (lambda block: block.tpot_s, _share_of_all(0.5)),
    "tpot_p95_s": (lambda block: block.tpot_s, _share_of_all(0.95)),
}
"""Figures by name: what is taken of a block, and how blocks are combined."""


def load_figures(
    blocks: Sequence[LoadBlock], other: Sequence[LoadBlock] | None = None
) -> dict[str, Interval]:
    """Return all figures of an endpoint, or their ratios to those of another endpoint.

    Intervals are by bootstrap over the blocks, paired for a ratio; with a single block an interval
    reaches from 0 to infinity.
    """
    found = {}
    for name, (taken, combined) in LOAD_FIGURES.items():
        below = None if other is None else [taken(block) for block in other]
        statistic = partial(_compute_resample, combined, [taken(block) for block in blocks], below)
        if len(blocks) < LEAST_BLOCKS:
            found[name] = Interval(estimate=statistic([range(1)]), low=0.0, high=math.inf)
        else:
            found[name] = bootstrap(statistic, [len(blocks)], seed=0, num_resamples=1000)
    return found


def _compute_resample(
    combined: Callable[[Sequence[Samples]], float],
    above: Sequence[Samples],
    below: Sequence[Samples] | None,
    groups: Sequence[Sequence[int]],
) -> float:
    value = combined([above[n] for n in groups[0]])
    return value if below is None else value / combined([below[n] for n in groups[0]])


def load_rows(blocks: Sequence[LoadBlock]) -> list[dict[str, tuple[LoadBlock, ...]]]:
    """Return the blocks by endpoint for every number of clients, those that all endpoints have."""
    rows = []
    names = list(dict.fromkeys(block.endpoint for block in blocks))
    for concurrency in sorted({block.concurrency for block in blocks}):
        by_index = {
            name: {b.index: b for b in blocks if (b.endpoint, b.concurrency) == (name, concurrency)}
            for name in names
        }
        shared = sorted(set.intersection(*map(set, by_index.values())))
        if shared:
            rows.append({name: tuple(found[n] for n in shared) for name, found in by_index.items()})
    return rows


def load_outcome(ratio: Interval, num_blocks: int) -> str:
    """Return a ratio with its interval as text, and whether it may be 1."""
    shown = ratio.show() + warn_of_few(num_blocks)
    return f"{shown}, no difference shown" if ratio.low <= 1.0 <= ratio.high else shown


def agreement(blocks: Sequence[LoadBlock], other: Sequence[LoadBlock]) -> tuple[int, Interval]:
    """Return how many texts of two endpoints were compared, and the share that is equal."""
    pairs = [
        (one.text, two.text)
        for block, paired in zip(blocks, other, strict=True)
        for one, two in zip(block.completions, paired.completions, strict=True)
    ]
    return len(pairs), wilson_interval(sum(one == two for one, two in pairs), len(pairs))
