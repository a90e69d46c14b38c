"""Random draw of all requests of a workload, before the simulation begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.plan.simulation.config import Phase, Workload
from forerun.plan.simulation.kinds import (
    SQRT_3,
    Acceptance,
    Arrivals,
    Bursty,
    Clustered,
    Constant,
    Drifting,
    Fixed,
    Lengths,
    Listed,
    Lognormal,
    Mixed,
    PerPosition,
    Poisson,
    Recorded,
    Uniform,
)
from forerun.theory.speedup import conditional_acceptance
from forerun.theory.splitmix import FACTORS, INCREMENT, MASK, SHIFTS, finalise

NDFloats = NDArray[np.float64]


class SimulatedDraw(IntEnum):
    """Purposes of random numbers; each purpose has random numbers of its own."""

    ARRIVALS = 1
    BURSTS = 2
    PROMPTS = 3
    OUTPUTS = 4
    ALPHAS = 5
    KINDS = 6
    TEXT = 7


def key_of(*parts: int) -> int:
    """Return a 64-bit key made of several numbers, in order."""
    key = INCREMENT
    for part in parts:
        key = finalise(key + part * INCREMENT)
    return key


def uniforms(key: int, count: int) -> NDFloats:
    """Return `count` numbers in [0, 1) with 53 bits each."""
    counters = np.arange(1, count + 1, dtype=np.uint64)
    bits = counters * np.uint64(INCREMENT) + np.uint64(key & MASK)
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    bits ^= bits >> np.uint64(SHIFTS[-1])
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normals(key: int, count: int) -> NDFloats:
    """Return `count` standard normal numbers, two from every two uniform ones.

    Source: Box and Muller 1958.
    """
    pairs: Any = uniforms(key, 2 * ((count + 1) // 2)).reshape(2, -1)
    radius, angle = np.sqrt(-2.0 * np.log1p(-pairs[0])), 2.0 * np.pi * pairs[1]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Arrival, lengths and acceptance of all requests, in the order of arrival.

    Attributes:
        arrival_s: seconds from the start.
        num_prompt: prompt tokens.
        num_output: output tokens.
        alphas: P(accepted | all before it accepted) by position, shared between requests alike.
        tags: of their kind.
        phases: number of the phase they come in.
        sibling_acceptance: of further children in draft trees; see `Workload`.
        temperature: of all of them.
        tpot_target_s: most seconds per token they should take; None: no target.
        max_k: most drafted tokens per step.
        seed: of everything random.
    """

    arrival_s: Sequence[float]
    num_prompt: Sequence[int]
    num_output: Sequence[int]
    alphas: Sequence[tuple[float, ...]]
    tags: Sequence[tuple[str, ...]]
    phases: Sequence[int]
    sibling_acceptance: float
    temperature: float
    tpot_target_s: float | None
    max_k: int
    seed: int

    def text(self, index: int) -> list[float]:
        """Return a uniform number per output token; a draft token is accepted if it is below alpha.

        Whatever K is, a position has the same number, so a controller changes what is drafted and
        not what could have been accepted.
        """
        key = key_of(self.seed, SimulatedDraw.TEXT, index)
        numbers: list[float] = uniforms(key, self.num_output[index] + self.max_k + 1).tolist()
        return numbers


def traffic_of(workload: Workload, seed: int) -> Traffic:
    """Draw the requests of a workload."""
    count = workload.requests
    phases = _phase_numbers(workload.phases, count)
    alphas: list[tuple[float, ...]] = []
    tags: list[tuple[str, ...]] = []
    for number, phase in enumerate(workload.phases):
        size = phases.count(number)
        found, its_tags = _alphas_of(
            phase.acceptance,
            size,
            workload.server.max_k,
            key_of(seed, SimulatedDraw.ALPHAS, number),
        )
        alphas += found
        tags += its_tags
    return Traffic(
        arrival_s=_arrivals_of(workload.arrivals, count, seed),
        num_prompt=_lengths_of(workload.prompt_tokens, count, key_of(seed, SimulatedDraw.PROMPTS)),
        num_output=_lengths_of(workload.output_tokens, count, key_of(seed, SimulatedDraw.OUTPUTS)),
        alphas=alphas,
        tags=tags,
        phases=phases,
        sibling_acceptance=workload.sibling_acceptance,
        temperature=workload.temperature,
        tpot_target_s=workload.slo.tpot_s,
        max_k=workload.server.max_k,
        seed=seed,
    )


def _phase_numbers(phases: Sequence[Phase], count: int) -> list[int]:
    """Return the phase of every request."""
    ends = [round(count * share) for share in accumulate(phase.share for phase in phases)]
    ends[-1] = count
    starts = [0, *ends[:-1]]
    return [
        number
        for number, (start, end) in enumerate(zip(starts, ends, strict=True))
        for _ in range(end - start)
    ]


def _arrivals_of(arrivals: Arrivals, count: int, seed: int) -> list[float]:
    """Arrival time of every request in seconds, ascending."""
    if isinstance(arrivals, Recorded):
        return list(arrivals.times_s)
    if isinstance(arrivals, Poisson):
        return floats(
            gaps(key_of(seed, SimulatedDraw.ARRIVALS), count, arrivals.rate_per_s).cumsum()
        )
    if isinstance(arrivals, Bursty):
        sizes = _burst_sizes(key_of(seed, SimulatedDraw.BURSTS), count, arrivals.burst)
        rate_per_s = arrivals.rate_per_s / arrivals.burst
        starts = gaps(key_of(seed, SimulatedDraw.ARRIVALS), len(sizes), rate_per_s).cumsum()
        return floats(np.repeat(starts, sizes)[:count])
    return [0.0] * count


def gaps(key: int, count: int, rate_per_s: float) -> NDFloats:
    """Return exponentially distributed times between arrivals."""
    return -np.log1p(-uniforms(key, count)) / rate_per_s


def _burst_sizes(key: int, count: int, mean: float) -> list[int]:
    """Return geometric burst sizes, from 1 on, that add up to at least `count` requests."""
    if mean == 1.0:
        return [1] * count
    numbers = np.log1p(-uniforms(key, count)) / np.log1p(-1.0 / mean)
    sizes = 1.0 + np.floor(numbers)
    enough = int(np.searchsorted(sizes.cumsum(), count)) + 1
    return whole(sizes[:enough])


def _lengths_of(lengths: Lengths, count: int, key: int) -> list[int]:
    """Return the length of every text."""
    if isinstance(lengths, Fixed):
        return [lengths.tokens] * count
    if isinstance(lengths, Listed):
        values = lengths.values
        return [values[index % len(values)] for index in range(count)]
    if isinstance(lengths, Uniform):
        span = lengths.most - lengths.least + 1
        return whole(lengths.least + np.floor(uniforms(key, count) * span))
    return lognormal(lengths, count, key)


def lognormal(lengths: Lognormal, count: int, key: int) -> list[int]:
    found = np.rint(lengths.median * np.exp(lengths.sigma * normals(key, count)))
    return whole(np.clip(found, 1.0, lengths.most))


def _alphas_of(
    acceptance: Acceptance, count: int, max_k: int, key: int
) -> tuple[list[tuple[float, ...]], list[tuple[str, ...]]]:
    """Return acceptance by position and tags for `count` requests."""
    if isinstance(acceptance, Mixed):
        return mixed(acceptance, count, max_k, key)
    untagged: list[tuple[str, ...]] = [()] * count
    if isinstance(acceptance, PerPosition):
        return [conditional(acceptance.beta, max_k)] * count, untagged
    if isinstance(acceptance, Constant):
        return [(acceptance.alpha,) * max_k] * count, untagged
    if isinstance(acceptance, Clustered):
        reach = SQRT_3 * acceptance.spread
        values = acceptance.alpha + reach * (2.0 * uniforms(key, count) - 1.0)
    else:
        assert isinstance(acceptance, Drifting)
        values = np.linspace(acceptance.start, acceptance.end, count)
    return [(alpha,) * max_k for alpha in values.tolist()], untagged


def mixed(
    acceptance: Mixed, count: int, max_k: int, key: int
) -> tuple[list[tuple[float, ...]], list[tuple[str, ...]]]:
    """Choose a component of the mixture for every request by weight, and draw its acceptance."""
    weights = np.array([part.weight for part in acceptance.parts])
    edges = weights.cumsum() / weights.sum()
    chosen = np.searchsorted(edges, uniforms(key_of(key, SimulatedDraw.KINDS), count), side="right")
    alphas: list[tuple[float, ...]] = [()] * count
    tags: list[tuple[str, ...]] = [()] * count
    for number, part in enumerate(acceptance.parts):
        places = np.flatnonzero(chosen == number).tolist()
        found, its_tags = _alphas_of(part.acceptance, len(places), max_k, key_of(key, number))
        for place, alpha, inner in zip(places, found, its_tags, strict=True):
            alphas[place] = alpha
            tags[place] = (part.tag, *inner)
    return alphas, tags


def conditional(beta: Sequence[float], max_k: int) -> tuple[float, ...]:
    """Return P(accepted | all before it accepted) for `max_k` positions."""
    alphas = conditional_acceptance(beta)
    return (*alphas, *[alphas[-1]] * max_k)[:max_k]


def floats(values: NDFloats) -> list[float]:
    found: list[float] = values.tolist()
    return found


def whole(values: NDFloats) -> list[int]:
    """Return an array of whole numbers as a list of integers."""
    found: list[int] = values.astype(np.int64).tolist()
    return found
