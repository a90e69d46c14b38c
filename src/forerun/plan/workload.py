"""A workload: its settings, the file they are read from, and what is drawn at random from them."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from forerun.bounded_read import read_bytes
from forerun.errors import (
    InvalidRequest,
    InvalidTrace,
    Range,
    UnreadableInput,
    check_ranges,
    explain_invalid,
)
from forerun.plan.acceptance import MIN_ALLOWED
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.record import RequestRecord, StepRecord
from forerun.theory.speedup import conditional_acceptance
from forerun.theory.splitmix import FACTORS, INCREMENT, MASK, SHIFTS, finalise
from forerun.trace.files import Item, read_trace

MAX_REQUESTS = 10_000_000
MAX_TOKENS = 1_000_000_000
"""Prompts and outputs together; more would take a simulation hours."""

Length = Annotated[int, Meta(ge=1)]
Prob = Annotated[float, Meta(ge=0.0, le=1.0)]
Positive = Annotated[float, Meta(gt=0.0, le=1e12)]
Temperature = Annotated[float, Meta(ge=0.0, le=1e12)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything that a workload file holds."""


class Poisson(Settings, frozen=True, tag_field="kind", tag="poisson"):
    """Arrivals of a Poisson process."""

    rate_per_s: Positive


class Uniform(Settings, frozen=True, tag_field="kind", tag="uniform"):
    """A uniformly distributed number of tokens from `least` to `most`."""

    least: Length
    most: Length

    def __post_init__(self) -> None:
        check_ranges(self, Range("most", self.least, integer=True))


class Lognormal(Settings, frozen=True, tag_field="kind", tag="lognormal"):
    """Lognormal lengths, many short and few long ones, cut at `most`."""

    median: Annotated[float, Meta(ge=1.0, le=1e12)]
    sigma: Annotated[float, Meta(ge=0.0, le=5.0)]
    most: Length


class Constant(Settings, frozen=True, tag_field="kind", tag="constant"):
    """The same acceptance probability at every position of every request."""

    alpha: Prob


Arrivals = Poisson | tuple[float, ...]
"""A process, or seconds from the start, ascending, one per request; none: all at once."""
Lengths = Uniform | Lognormal | Length | Annotated[tuple[Length, ...], Meta(min_length=1)]
"""A distribution, one length for all, or lengths that are repeated."""
Acceptance = Constant | Annotated[tuple[Prob, ...], Meta(min_length=1)]
"""P(accepted | all before it accepted), or survival by position (beta at a fixed K)."""


class Phase(Settings, frozen=True):
    """A run of consecutive requests with the same distribution of acceptance."""

    share: Annotated[float, Meta(gt=0.0, le=1.0)]
    acceptance: Acceptance
    name: str = ""

    def __post_init__(self) -> None:
        """Refuse survival that rises."""
        if isinstance(self.acceptance, tuple):
            for place, (before, value) in enumerate(pairwise((1.0, *self.acceptance)), start=1):
                Range(f"acceptance at position {place}", 0, high=before).check(value)


class SimulatedServerConfig(Settings, frozen=True):
    """Settings of the simulated server, with the names and meanings of the engine's settings.

    Attributes:
        max_context: prompt plus output tokens of a sequence.
        prefill_chunk: most prompt tokens of one sequence in one pass.
        max_step_rows: most rows of one pass.
        max_k: most tokens of a drafted chain, and most levels of a tree.
    """

    max_batch: Length = 8
    max_context: Annotated[int, Meta(ge=2)] = 4096
    prefill_chunk: Length = 256
    max_step_rows: int = 1024
    max_k: Annotated[int, Meta(ge=0, le=64)] = 8
    max_tree_nodes: Annotated[int, Meta(ge=0, le=64)] = 16

    def __post_init__(self) -> None:
        least = self.max_batch * (self.max_k + 1)
        check_ranges(self, Range("max_step_rows", least, integer=True))


class Slo(Settings, frozen=True):
    """Service level objectives: the latency limits of a request.

    Attributes:
        ttft_s: most seconds to the first token (None: no limit).
        tpot_s: most seconds per token after it, on average (None: no limit).
    """

    ttft_s: Positive | None = None
    tpot_s: Positive | None = None


class Workload(Settings, frozen=True):
    """Everything that a simulation needs except the cost table and the controller.

    Attributes:
        arrivals: arrival times; empty: all at time 0.
        sibling_acceptance: P(a further likely token is accepted | those before it at the same
            place are not), for draft trees; 0 means that branches are never accepted.
        temperature: of all requests; it decides between greedy and sampled drafts.
    """

    requests: Annotated[int, Meta(ge=1, le=MAX_REQUESTS)]
    output_tokens: Lengths
    phases: tuple[Phase, ...]
    arrivals: Arrivals = ()
    prompt_tokens: Lengths = 128
    sibling_acceptance: Prob = 0.0
    temperature: Temperature = 0.0
    server: SimulatedServerConfig = SimulatedServerConfig()
    slo: Slo = Slo()

    def __post_init__(self) -> None:
        total_share = math.fsum(phase.share for phase in self.phases)
        if abs(total_share - 1.0) > 1e-6:
            raise InvalidRequest(
                f"the shares of the phases add up to {total_share:g}; it must be 1"
            )
        if isinstance(self.arrivals, tuple) and self.arrivals:
            _check_arrivals(self.arrivals, self.requests)
        longest = sum(_find_longest(self, name) for name in ("prompt_tokens", "output_tokens"))
        if longest > self.server.max_context:
            raise InvalidRequest(
                f"a request may have {longest} tokens, and max_context is "
                f"{self.server.max_context}: it would never finish; raise it, or limit the lengths"
            )
        if self.requests * longest > MAX_TOKENS:
            raise InvalidRequest(
                f"{self.requests} requests of up to {longest} tokens are too many to simulate; "
                f"{MAX_TOKENS:.0e} tokens in all are possible"
            )


def _check_arrivals(times_s: Sequence[float], num_requests: int) -> None:
    if len(times_s) != num_requests:
        raise InvalidRequest(f"{len(times_s)} arrivals are given for {num_requests} requests")
    for number, (before, after) in enumerate(pairwise((0.0, *times_s)), start=1):
        if not before <= after < math.inf:
            raise InvalidRequest(
                f"arrival {number} is at {after:g} s, after one at {before:g} s; "
                "they must ascend from 0"
            )


def _find_longest(workload: Workload, name: str) -> int:
    """Return the largest of some lengths."""
    lengths: Lengths = getattr(workload, name)
    if isinstance(lengths, Uniform | Lognormal):
        return lengths.most
    return lengths if isinstance(lengths, int) else max(lengths)


def workload_of(
    items: Iterable[Item], where: str, server: SimulatedServerConfig, slo: Slo, temperature: float
) -> Workload:
    """Return the finished requests of a trace as a workload.

    A request arrives its time to first token before its first token. Acceptance is that of all
    requests together, by position: requests keep their own lengths, but not their own alphas.
    """
    first_token_s: dict[str, float] = {}
    ended: list[tuple[float, RequestRecord]] = []
    counts = AcceptanceCounts()
    for item in items:
        if isinstance(item, StepRecord):
            first_token_s.setdefault(item.request_id, item.t_s + item.cycle_s)
            if item.num_drafted:
                counts.add(item.depth_drafted, item.num_accepted, num_drafted=item.num_drafted)
        elif isinstance(item, RequestRecord) and item.request_id in first_token_s:
            ended.append((first_token_s[item.request_id], item))
    ended = [
        (first_s - record.ttft_s, record)
        for first_s, record in ended
        if record.ttft_s is not None and record.num_output_tokens
    ]
    ended.sort(key=lambda pair: pair[0])
    if not ended:
        raise InvalidTrace(f"no request of the trace {where} ended: there is nothing to repeat")
    reached = counts.reached_per_position
    deepest = next((i for i, n in enumerate(reached) if n < MIN_ALLOWED), len(reached))
    acceptance = counts.survival[:deepest] or Constant(alpha=0.0)
    return Workload(
        requests=len(ended),
        arrivals=tuple(arrival_s - ended[0][0] for arrival_s, _ in ended),
        prompt_tokens=tuple(record.num_prompt_tokens for _, record in ended),
        output_tokens=tuple(record.num_output_tokens for _, record in ended),
        phases=(Phase(share=1.0, acceptance=acceptance),),
        temperature=temperature,
        server=server,
        slo=slo,
    )


class _RepeatedTrace(Settings, frozen=True):
    """A workload file that names a trace; the trace decides everything else."""

    trace: str
    temperature: Temperature = 0.0
    server: SimulatedServerConfig = SimulatedServerConfig()
    slo: Slo = Slo()


def load_workload(path: Path) -> Workload:
    """Read a workload file, which describes a workload or names a trace to repeat."""
    try:
        content = tomllib.loads(read_bytes(path).decode())
    except UnreadableInput as error:
        raise InvalidRequest(f"the workload cannot be used: {error}") from error
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, too many digits
        raise InvalidRequest(f"the workload {path} is not TOML: {error}") from error
    try:
        if "trace" not in content:
            return workload_from(content)
        repeated = msgspec.convert(content, _RepeatedTrace)
    except msgspec.ValidationError as error:
        kind = _RepeatedTrace if "trace" in content else Workload
        reason = explain_invalid(error, _with_phases(content), kind)
        raise InvalidRequest(f"the workload {path} cannot be used: {reason}") from error
    file = path.parent / repeated.trace
    return workload_of(
        read_trace(file), str(file), repeated.server, repeated.slo, repeated.temperature
    )


def workload_from(content: dict[str, object]) -> Workload:
    return msgspec.convert(_with_phases(content), Workload)


def _with_phases(content: dict[str, object]) -> dict[str, object]:
    if "acceptance" not in content or "phases" in content:
        return content
    content = dict(content)
    return content | {"phases": [{"share": 1.0, "acceptance": content.pop("acceptance")}]}


NDFloats = NDArray[np.float64]


class SimulatedDraw(IntEnum):
    """Purposes of random numbers; each purpose has random numbers of its own."""

    ARRIVALS = 1
    PROMPTS = 3
    OUTPUTS = 4
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


def number_phases(phases: Sequence[Phase], count: int) -> list[int]:
    """Return the number of the phase that each request belongs to."""
    ends = [round(count * share) for share in accumulate(phase.share for phase in phases)]
    ends[-1] = count
    return [sum(index >= end for end in ends) for index in range(count)]


def draw_arrivals(arrivals: Arrivals, count: int, seed: int) -> list[float]:
    if isinstance(arrivals, Poisson):
        numbers = uniforms(key_of(seed, SimulatedDraw.ARRIVALS), count)
        times: list[float] = (-np.log1p(-numbers) / arrivals.rate_per_s).cumsum().tolist()
        return times
    return list(arrivals) or [0.0] * count


def draw_lengths(lengths: Lengths, count: int, key: int) -> list[int]:
    if isinstance(lengths, int):
        return [lengths] * count
    if isinstance(lengths, tuple):
        return [lengths[index % len(lengths)] for index in range(count)]
    if isinstance(lengths, Uniform):
        span = lengths.most - lengths.least + 1
        drawn = lengths.least + np.floor(uniforms(key, count) * span)
    else:
        drawn = np.rint(lengths.median * np.exp(lengths.sigma * normals(key, count)))
        drawn = np.clip(drawn, 1.0, lengths.most)
    whole: list[int] = drawn.astype(np.int64).tolist()
    return whole


def alphas_of(acceptance: Acceptance, max_k: int) -> tuple[float, ...]:
    """Return P(accepted | all before it accepted) by position."""
    if isinstance(acceptance, Constant):
        return (acceptance.alpha,) * max_k
    alphas = conditional_acceptance(acceptance)
    return (*alphas, *[alphas[-1]] * max_k)[:max_k]
