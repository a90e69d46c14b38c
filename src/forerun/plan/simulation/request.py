"""Simulated requests: drawn from a workload, and their states and records for a controller."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from forerun.control.base import Plan, RequestState, Tree
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
from forerun.theory.record import StepRecord
from forerun.theory.speedup import conditional_acceptance
from forerun.theory.splitmix import FACTORS, INCREMENT, MASK, SHIFTS, finalise
from forerun.theory.stop_rule import Measure, StopRule
from forerun.theory.tree import TokenTree, static_tree

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


def measured(measure: Measure, alpha: float) -> float:
    """Return the value that a stop rule would measure at a position.

    The draft's top probability is taken to be the probability that its token is accepted, and the
    rest of its distribution to be one other token.
    """
    if measure == "top_probability":
        return alpha
    shares = (alpha, 1.0 - alpha)
    return -math.fsum(share * math.log(share) for share in shares if share)


def _stopped_depth(rule: StopRule, alphas: Sequence[float], depth: int) -> int:
    """Return how many of `depth` tokens are drafted; the first one always is."""
    for position in range(1, depth):
        if rule.stops(measured(rule.measure, alphas[position])):
            return position
    return depth


PLAIN = Plan()


class SimulatedRequest:
    """The state of one simulated sequence from its arrival to its last token.

    Attributes:
        alphas: P(accepted | all before it accepted) by drafted position.
        tpot_target_s: most seconds per token it should take; None: no target.
        text: one number per output token; see `Traffic.text`.
        num_nodes: tokens drafted in the current step, more than levels in a tree.
        sibling_acceptance: P(a further child is accepted | those before it are not).
    """

    __slots__ = (
        "alphas", "arrival_s", "depth", "finished_s", "first_s", "index", "name", "num_accepted",
        "num_emitted", "num_new", "num_nodes", "num_output", "num_prompt", "num_read",
        "num_steps", "num_tested", "num_unread", "path", "phase", "plan", "sibling_acceptance",
        "tags", "temperature", "text", "tpot_target_s", "tree",
    )  # fmt: skip

    def __init__(self, traffic: Traffic, index: int) -> None:
        self.index = index
        self.name = f"request-{index}"
        self.arrival_s = traffic.arrival_s[index]
        self.num_prompt = traffic.num_prompt[index]
        self.num_output = traffic.num_output[index]
        self.alphas = traffic.alphas[index]
        self.tags: tuple[str, ...] = ()
        self.sibling_acceptance = traffic.sibling_acceptance
        self.temperature = traffic.temperature
        self.tpot_target_s = traffic.tpot_target_s
        self.phase = traffic.phases[index]
        self.text = traffic.text(index)
        self.num_unread = self.num_prompt
        self.num_emitted = 0
        self.num_read = 0
        self.num_steps = 0
        self.rest()
        self.num_new = 0
        self.first_s = 0.0
        self.finished_s = 0.0

    @property
    def num_committed(self) -> int:
        return self.num_prompt + self.num_emitted

    def rest(self) -> None:
        """Draft nothing in this step."""
        self.plan = PLAIN
        self.tree: TokenTree | None = None
        self.path: tuple[int, ...] = ()
        self.num_nodes = 0
        self.depth = self.num_tested = self.num_accepted = 0

    def draft(self, plan: Plan, max_nodes: int, max_depth: int) -> None:
        """Draft the shape of a plan, cut to `max_nodes` nodes and `max_depth` levels."""
        depth, num_nodes = min(plan.shape.depth, max_depth), min(plan.shape.num_nodes, max_nodes)
        self.tree = None
        if isinstance(plan.shape, Tree) and min(depth, num_nodes) > 0:
            ranks = self.ranks(0, plan.shape.width)
            self.tree = static_tree(ranks, num_nodes, depth, plan.shape.width)
            num_nodes, depth = len(self.tree.parents), max(self.tree.depths)
        else:
            num_nodes = depth = min(depth, num_nodes)
            if plan.stop is not None:
                num_nodes = depth = _stopped_depth(plan.stop, self.alphas, depth)
        if depth > 0:
            self.depth, self.num_nodes, self.plan = depth, num_nodes, plan
        elif self.depth:
            self.rest()

    def ranks(self, level: int, width: int) -> tuple[float, ...]:
        """Return P(child accepted, given its parent is) for sibling ranks at a tree level."""
        first, share = self.alphas[level], self.sibling_acceptance
        return (first, *((1 - first) * (1 - share) ** at * share for at in range(width - 1)))

    def walk(self, tree: TokenTree) -> tuple[int, ...]:
        """Return the accepted path of a tree; first children are accepted as in a chain."""
        path: list[int] = []
        while children := tree.children(path[-1] if path else -1):
            bounds = accumulate(self.ranks(len(path), len(children)))
            drawn = self.text[self.num_emitted + len(path)]
            node = next((n for n, b in zip(children, bounds, strict=True) if drawn < b), None)
            if node is None:
                break
            path.append(node)
        return tuple(path)

    def accepted_of(self, num_tested: int) -> int:
        """Return how many of the next drafted tokens are accepted before the first rejection."""
        text, alphas, start = self.text, self.alphas, self.num_emitted
        accepted = 0
        while accepted < num_tested and text[start + accepted] < alphas[accepted]:
            accepted += 1
        return accepted

    def state(self) -> RequestState:
        """Return the state that a controller receives before the next step."""
        return RequestState(
            request_id=self.name,
            num_committed=self.num_committed,
            max_new=self.num_output - self.num_emitted,
            temperature=self.temperature,
            tags=self.tags,
            tpot_target_s=self.tpot_target_s,
        )


class States(Sequence[RequestState]):
    """A sequence of the states of decoding requests, each created when it is accessed."""

    def __init__(self, requests: Sequence[SimulatedRequest]) -> None:
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    @overload
    def __getitem__(self, index: int) -> RequestState: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RequestState]: ...
    def __getitem__(self, index: int | slice) -> RequestState | Sequence[RequestState]:
        if isinstance(index, slice):
            return [request.state() for request in self._requests[index]]
        return self._requests[index].state()

    def __iter__(self) -> Iterator[RequestState]:
        return (request.state() for request in self._requests)


class SimulatedCycle:
    """Holds the figures that all requests of a cycle share."""

    __slots__ = (
        "draft_s", "num_prefill_rows", "num_rows", "number", "other_s", "started_s", "verify_s",
    )  # fmt: skip

    def __init__(self, number: int, started_s: float) -> None:
        self.number = number
        self.started_s = started_s
        self.draft_s = 0.0
        self.verify_s = 0.0
        self.other_s = 0.0
        self.num_rows = 0
        self.num_prefill_rows = 0

    @property
    def num_decode_rows(self) -> int:
        return self.num_rows - self.num_prefill_rows

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s


class Records(Sequence[StepRecord]):
    """A sequence of the records of requests that emitted, each created when it is accessed."""

    def __init__(self, cycle: SimulatedCycle, requests: Sequence[SimulatedRequest]) -> None:
        self._cycle = cycle
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[StepRecord]: ...
    def __getitem__(self, index: int | slice) -> StepRecord | Sequence[StepRecord]:
        if isinstance(index, slice):
            return [record_of(self._cycle, request) for request in self._requests[index]]
        return record_of(self._cycle, self._requests[index])

    def __iter__(self) -> Iterator[StepRecord]:
        return (record_of(self._cycle, request) for request in self._requests)


def record_of(cycle: SimulatedCycle, request: SimulatedRequest) -> StepRecord:
    depth, rule = request.num_tested, request.plan.stop
    ranks, children = _path_of(request)
    return StepRecord(
        cycle_id=cycle.number,
        t_s=cycle.started_s,
        request_id=request.name,
        step=request.num_steps,
        method=request.plan.method if depth else "plain",
        k_budget=request.plan.num_speculative_tokens,
        num_drafted=depth if request.tree is None else request.num_nodes,
        depth_drafted=depth,
        num_accepted=request.num_accepted,
        num_emitted=request.num_new,
        draft_s=cycle.draft_s,
        verify_s=cycle.verify_s,
        other_s=cycle.other_s,
        batch_rows=cycle.num_rows,
        num_prefill_rows=cycle.num_prefill_rows,
        context_tokens=request.num_committed - request.num_new,
        last_token_source="bonus" if request.num_accepted == depth else "recovered",
        expected_accepted=float(request.num_accepted),
        stop_values=None
        if rule is None
        else tuple(measured(rule.measure, alpha) for alpha in request.alphas[:depth]),
        path_ranks=ranks,
        path_children=children,
    )


def _path_of(request: SimulatedRequest) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return the accepted path of a tree as ranks and numbers of children; None for a chain."""
    tree = request.tree
    if tree is None:
        return None, None
    siblings = [tree.children(node) for node in (-1, *request.path)]
    ranks = (among.index(node) + 1 for among, node in zip(siblings, request.path, strict=False))
    return tuple(ranks), tuple(map(len, siblings))
