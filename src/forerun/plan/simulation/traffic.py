"""Random draw of all requests of a workload, before the simulation begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.plan.simulation.config import (
    SQRT_3,
    Acceptance,
    Arrivals,
    Clustered,
    Constant,
    Lengths,
    Phase,
    Poisson,
    Uniform,
    Workload,
)
from forerun.theory.speedup import conditional_acceptance
from forerun.theory.splitmix import FACTORS, INCREMENT, MASK, SHIFTS, finalise

NDFloats = NDArray[np.float64]


class SimulatedDraw(IntEnum):
    """Purposes of random numbers; each purpose has random numbers of its own."""

    ARRIVALS = 1
    PROMPTS = 3
    OUTPUTS = 4
    ALPHAS = 5
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
        alphas: P(accepted | all before it accepted) by position, shared between requests alike.
        tpot_target_s: most seconds per token they should take; None: no target.
    """

    arrival_s: Sequence[float]
    num_prompt: Sequence[int]
    num_output: Sequence[int]
    alphas: Sequence[tuple[float, ...]]
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
    for number, phase in enumerate(workload.phases):
        key = key_of(seed, SimulatedDraw.ALPHAS, number)
        size, max_k = phases.count(number), workload.server.max_k
        alphas += _draw_alphas(phase.acceptance, size, max_k, key)
    return Traffic(
        arrival_s=_draw_arrivals(workload.arrivals, count, seed),
        num_prompt=_draw_lengths(
            workload.prompt_tokens, count, key_of(seed, SimulatedDraw.PROMPTS)
        ),
        num_output=_draw_lengths(
            workload.output_tokens, count, key_of(seed, SimulatedDraw.OUTPUTS)
        ),
        alphas=alphas,
        phases=phases,
        sibling_acceptance=workload.sibling_acceptance,
        temperature=workload.temperature,
        tpot_target_s=workload.slo.tpot_s,
        max_k=workload.server.max_k,
        seed=seed,
    )


def _phase_numbers(phases: Sequence[Phase], count: int) -> list[int]:
    ends = [round(count * share) for share in accumulate(phase.share for phase in phases)]
    ends[-1] = count
    starts = [0, *ends[:-1]]
    return [
        number
        for number, (start, end) in enumerate(zip(starts, ends, strict=True))
        for _ in range(end - start)
    ]


def _draw_arrivals(arrivals: Arrivals, count: int, seed: int) -> list[float]:
    """Return the arrival time of every request in seconds, ascending."""
    if isinstance(arrivals, Poisson):
        numbers = uniforms(key_of(seed, SimulatedDraw.ARRIVALS), count)
        times: list[float] = (-np.log1p(-numbers) / arrivals.rate_per_s).cumsum().tolist()
        return times
    return list(arrivals) or [0.0] * count


def _draw_lengths(lengths: Lengths, count: int, key: int) -> list[int]:
    if isinstance(lengths, int):
        return [lengths] * count
    if isinstance(lengths, tuple):
        return [lengths[index % len(lengths)] for index in range(count)]
    if isinstance(lengths, Uniform):
        span = lengths.most - lengths.least + 1
        found = lengths.least + np.floor(uniforms(key, count) * span)
    else:
        found = np.rint(lengths.median * np.exp(lengths.sigma * normals(key, count)))
        found = np.clip(found, 1.0, lengths.most)
    whole: list[int] = found.astype(np.int64).tolist()
    return whole


def _draw_alphas(
    acceptance: Acceptance, count: int, max_k: int, key: int
) -> list[tuple[float, ...]]:
    """Return P(accepted | all before it accepted) by position for `count` requests."""
    if isinstance(acceptance, Constant):
        return [(acceptance.alpha,) * max_k] * count
    if isinstance(acceptance, Clustered):
        reach = SQRT_3 * acceptance.spread
        values = acceptance.alpha + reach * (2.0 * uniforms(key, count) - 1.0)
        return [(alpha,) * max_k for alpha in values.tolist()]
    alphas = conditional_acceptance(acceptance)
    return [(*alphas, *[alphas[-1]] * max_k)[:max_k]] * count
