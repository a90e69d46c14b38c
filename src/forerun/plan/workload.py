"""A workload, its settings, and the requests of a simulation.

Arrivals, lengths and acceptance are numbers, lists, or one of five kinds of random distributions.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeVar, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from forerun.bounded_read import read_bytes
from forerun.control.base import Plan, RequestState, Tree
from forerun.errors import InvalidRequest, InvalidTrace, Range, UnreadableInput, check_ranges
from forerun.plan.acceptance import MIN_ALLOWED
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.record import RequestRecord, StepRecord
from forerun.theory.speedup import conditional_acceptance
from forerun.theory.splitmix import FACTORS, INCREMENT, MASK, SHIFTS, finalise
from forerun.theory.tree import TokenTree, static_tree
from forerun.trace.files import Item, read_trace

MAX_REQUESTS = 10_000_000
MAX_TOKENS = 1_000_000_000
"""Prompts and outputs together, by their means; more would take a simulation hours."""
SQRT_3 = math.sqrt(3.0)
"""Half the width of a uniform distribution over its standard deviation."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything that a workload file holds."""


class Poisson(Settings, frozen=True, tag_field="kind", tag="poisson"):
    """Arrivals of a Poisson process."""

    rate_per_s: float

    def __post_init__(self) -> None:
        check_ranges(self, Range("rate_per_s", 0, above_low=True))


class Uniform(Settings, frozen=True, tag_field="kind", tag="uniform"):
    """A uniformly distributed number of tokens from `least` to `most`."""

    least: int
    most: int

    def __post_init__(self) -> None:
        check_ranges(self, Range("least", 1, integer=True), Range("most", self.least, integer=True))


class Lognormal(Settings, frozen=True, tag_field="kind", tag="lognormal"):
    """Lognormal lengths, many short and few long ones, cut at `most`."""

    median: float
    sigma: float
    most: int

    def __post_init__(self) -> None:
        check_ranges(
            self, Range("median", 1), Range("sigma", 0, high=5), Range("most", 1, integer=True)
        )


class Constant(Settings, frozen=True, tag_field="kind", tag="constant"):
    """The same acceptance probability at every position of every request."""

    alpha: float

    def __post_init__(self) -> None:
        check_ranges(self, Range("alpha", 0, high=1))


class Clustered(Settings, frozen=True, tag_field="kind", tag="clustered"):
    """An acceptance probability per request, uniformly distributed around the mean."""

    alpha: float
    spread: float

    def __post_init__(self) -> None:
        """Refuse alphas outside [0, 1]."""
        check_ranges(self, Range("alpha", 0, high=1), Range("spread", 0))
        most = min(self.alpha, 1.0 - self.alpha) / SQRT_3
        if self.spread > most:
            raise InvalidRequest(
                f"spread is {self.spread}; around {self.alpha} it is at most {most:.3f}, "
                "or some alpha would be no probability"
            )


Arrivals = Poisson | tuple[float, ...]
"""A process, or seconds from the start, ascending, one per request; none: all at once."""
Lengths = Uniform | Lognormal | int | tuple[int, ...]
"""A distribution, one length for all, or lengths that are repeated."""
Acceptance = Constant | Clustered | tuple[float, ...]
"""P(accepted | all before it accepted), or survival by position (beta at a fixed K)."""


def most_tokens(lengths: Lengths) -> int:
    if isinstance(lengths, int):
        return lengths
    return max(lengths) if isinstance(lengths, tuple) else lengths.most


def _mean_tokens(lengths: Lengths) -> float:
    """Return the mean of some lengths; of lognormal ones an upper bound."""
    if isinstance(lengths, int):
        return lengths
    if isinstance(lengths, tuple):
        return sum(lengths) / len(lengths)
    if isinstance(lengths, Uniform):
        return (lengths.least + lengths.most) / 2
    return min(lengths.most, lengths.median * math.exp(lengths.sigma**2 / 2))


class Phase(Settings, frozen=True):
    """A run of consecutive requests with the same distribution of acceptance."""

    share: float
    acceptance: Acceptance
    name: str = ""

    def __post_init__(self) -> None:
        """Refuse survival that rises or is outside [0, 1]."""
        check_ranges(self, Range("share", 0, high=1, above_low=True))
        if not isinstance(self.acceptance, tuple):
            return
        if not self.acceptance:
            raise InvalidRequest("acceptance is empty; give one figure per drafted position")
        before = 1.0
        for position, value in enumerate(self.acceptance, start=1):
            if not 0.0 <= value <= before:
                raise InvalidRequest(
                    f"acceptance at position {position} is {value}; it must be in [0, {before:g}]"
                )
            before = value


class SimulatedServerConfig(Settings, frozen=True):
    """Settings of the simulated server, with the names and meanings of the engine's settings.

    Attributes:
        max_context: prompt plus output tokens of a sequence.
        prefill_chunk: most prompt tokens of one sequence in one pass.
        max_step_rows: most rows of one pass.
        max_prefill_rows: most prompt tokens in one pass (None: what max_step_rows leaves).
        max_k: most tokens of a drafted chain, and most levels of a tree.
    """

    max_batch: int = 8
    max_context: int = 4096
    prefill_chunk: int = 256
    max_step_rows: int = 1024
    max_prefill_rows: int | None = None
    max_k: int = 8
    max_tree_nodes: int = 16

    def __post_init__(self) -> None:
        check_ranges(
            self,
            Range("max_batch", 1, integer=True),
            Range("max_context", 2, integer=True),
            Range("prefill_chunk", 1, integer=True),
            Range("max_step_rows", 1, integer=True),
            Range("max_prefill_rows", 1, integer=True, optional=True),
            Range("max_k", 0, high=64, integer=True),
            Range("max_tree_nodes", 0, high=64, integer=True),
        )
        if self.max_step_rows < self.max_batch * (self.max_k + 1):
            raise InvalidRequest(
                f"max_step_rows is {self.max_step_rows}, below max_batch x (max_k + 1) = "
                f"{self.max_batch * (self.max_k + 1)}; raise it or lower max_k"
            )


class Slo(Settings, frozen=True):
    """Service level objectives: the latency limits of a request.

    Attributes:
        ttft_s: most seconds to the first token (None: no limit).
        tpot_s: most seconds per token after it, on average (None: no limit).
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        check_ranges(
            self,
            Range("ttft_s", 0, above_low=True, optional=True),
            Range("tpot_s", 0, above_low=True, optional=True),
        )


class Workload(Settings, frozen=True):
    """Everything that a simulation needs except the cost table and the controller.

    Attributes:
        arrivals: arrival times; empty: all at time 0.
        sibling_acceptance: P(a further likely token is accepted | those before it at the same
            place are not), for draft trees; 0 means that branches are never accepted.
        temperature: of all requests; it decides between greedy and sampled drafts.
    """

    requests: int
    output_tokens: Lengths
    phases: tuple[Phase, ...]
    arrivals: Arrivals = ()
    prompt_tokens: Lengths = 128
    sibling_acceptance: float = 0.0
    temperature: float = 0.0
    server: SimulatedServerConfig = SimulatedServerConfig()
    slo: Slo = Slo()

    def __post_init__(self) -> None:
        check_ranges(
            self,
            Range("requests", 1, high=MAX_REQUESTS, integer=True),
            Range("temperature", 0),
            Range("sibling_acceptance", 0, high=1),
        )
        total_share = math.fsum(phase.share for phase in self.phases)
        if not self.phases or abs(total_share - 1.0) > 1e-6:
            raise InvalidRequest(
                f"the shares of the phases add up to {total_share:g}; it must be 1"
            )
        if isinstance(self.arrivals, tuple) and self.arrivals:
            _check_arrivals(self.arrivals, self.requests)
        for name in ("prompt_tokens", "output_tokens"):
            _check_lengths(getattr(self, name), name)
        longest = most_tokens(self.prompt_tokens) + most_tokens(self.output_tokens)
        if longest > self.server.max_context:
            raise InvalidRequest(
                f"a request may have {longest} tokens, and max_context is "
                f"{self.server.max_context}: it would never finish; raise it, or limit the lengths"
            )
        total = self.requests * (
            _mean_tokens(self.prompt_tokens) + _mean_tokens(self.output_tokens)
        )
        if total > MAX_TOKENS:
            raise InvalidRequest(
                f"{total:.1e} tokens in all are too many to simulate; {MAX_TOKENS:.0e} are possible"
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


def _check_lengths(lengths: Lengths, name: str) -> None:
    if lengths == ():
        raise InvalidRequest(f"{name} is an empty list; give at least one length")
    if isinstance(lengths, int | tuple):
        for value in (lengths,) if isinstance(lengths, int) else lengths:
            Range(name, 1, integer=True).check(value)


@dataclass(slots=True, kw_only=True)
class Seen:
    """Figures of one request of a trace."""

    first_token_s: float
    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    record: RequestRecord | None = None


def workload_of(
    items: Iterable[Item], where: str, server: SimulatedServerConfig, slo: Slo, temperature: float
) -> Workload:
    """Return the finished requests of a trace as a workload.

    A request arrives its time to first token before its first token. Acceptance is that of all
    requests together, by position: requests keep their own lengths, but not their own alphas.
    """
    seen = _read(items)
    ended = [
        (found.first_token_s - found.record.ttft_s, found.record)
        for found in seen.values()
        if found.record and found.record.ttft_s is not None and found.record.num_output_tokens
    ]
    ended.sort(key=lambda pair: pair[0])
    if not ended:
        raise InvalidTrace(f"no request of the trace {where} ended: there is nothing to repeat")
    start_s = ended[0][0]
    records = [record for _, record in ended]
    return Workload(
        requests=len(ended),
        arrivals=tuple(arrival_s - start_s for arrival_s, _ in ended),
        prompt_tokens=tuple(record.num_prompt_tokens for record in records),
        output_tokens=tuple(record.num_output_tokens for record in records),
        phases=(Phase(share=1.0, acceptance=_pool_acceptance(seen.values())),),
        temperature=temperature,
        server=server,
        slo=slo,
    )


def _read(items: Iterable[Item]) -> dict[str, Seen]:
    """Return the figures of all requests in a trace, by request id."""
    seen: dict[str, Seen] = {}
    for item in items:
        if isinstance(item, StepRecord):
            cycle_s = item.draft_s + item.verify_s + item.other_s
            found = seen.setdefault(item.request_id, Seen(first_token_s=item.t_s + cycle_s))
            if item.num_drafted:
                found.counts.add(
                    item.depth_drafted, item.num_accepted, num_drafted=item.num_drafted
                )
        elif isinstance(item, RequestRecord) and item.request_id in seen:
            seen[item.request_id].record = item
    return seen


def _pool_acceptance(requests: Iterable[Seen]) -> Acceptance:
    """Return the acceptance of all drafts together, or 0 where nothing was drafted."""
    pooled = sum((request.counts for request in requests), AcceptanceCounts())
    reached = pooled.reached_per_position
    deepest = next((i for i, n in enumerate(reached) if n < MIN_ALLOWED), len(reached))
    return pooled.survival[:deepest] or Constant(alpha=0.0)


class _RepeatedTrace(Settings, frozen=True):
    """A workload file that names a trace; the trace decides everything else."""

    trace: str
    temperature: float = 0.0
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
        raise InvalidRequest(f"the workload {path} cannot be used: {error}") from error
    file = path.parent / repeated.trace
    return workload_of(
        read_trace(file), str(file), repeated.server, repeated.slo, repeated.temperature
    )


def workload_from(content: dict[str, object]) -> Workload:
    if "acceptance" in content and "phases" not in content:
        content = dict(content)
        content["phases"] = [{"share": 1.0, "acceptance": content.pop("acceptance")}]
    return msgspec.convert(content, Workload)


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
    """

    arrival_s: Sequence[float]
    num_prompt: Sequence[int]
    num_output: Sequence[int]
    alphas: Sequence[tuple[float, ...]]
    phases: Sequence[int]
    sibling_acceptance: float
    temperature: float
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


PLAIN = Plan()


class SimulatedRequest:
    """The state of one simulated sequence from its arrival to its last token.

    Attributes:
        alphas: P(accepted | all before it accepted) by drafted position.
        text: one number per output token; see `Traffic.text`.
        num_nodes: tokens drafted in the current step, more than levels in a tree.
        sibling_acceptance: P(a further child is accepted | those before it are not).
    """

    __slots__ = (
        "alphas", "arrival_s", "depth", "first_s", "index", "name", "num_accepted",
        "num_emitted", "num_new", "num_nodes", "num_output", "num_prompt", "num_read",
        "num_steps", "num_tested", "num_unread", "path", "phase", "plan", "sibling_acceptance",
        "tags", "temperature", "text", "tree",
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
        self.phase = traffic.phases[index]
        self.text = traffic.text(index)
        self.num_unread = self.num_prompt
        self.num_emitted = 0
        self.num_read = 0
        self.num_steps = 0
        self.rest()
        self.num_new = 0
        self.first_s = 0.0

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
        )


ItemT = TypeVar("ItemT")


class LazySequence(Sequence[ItemT]):
    """A sequence whose items are computed from simulated requests at every access."""

    def __init__(
        self, make: Callable[[SimulatedRequest], ItemT], requests: Sequence[SimulatedRequest]
    ) -> None:
        self._make = make
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    @overload
    def __getitem__(self, index: int) -> ItemT: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ItemT]: ...
    def __getitem__(self, index: int | slice) -> ItemT | Sequence[ItemT]:
        if isinstance(index, slice):
            return [*map(self._make, self._requests[index])]
        return self._make(self._requests[index])

    def __iter__(self) -> Iterator[ItemT]:
        return map(self._make, self._requests)


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
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s


def record_of(cycle: SimulatedCycle, request: SimulatedRequest) -> StepRecord:
    depth = request.num_tested
    ranks, children = _accepted_path(request)
    last = "bonus" if request.num_accepted == depth else "recovered"
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
        last_token_source=last if depth else "plain",
        expected_accepted=float(request.num_accepted),
        path_ranks=ranks,
        path_children=children,
    )


def _accepted_path(
    request: SimulatedRequest,
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return the accepted path of a tree as ranks and numbers of children; None for a chain."""
    tree = request.tree
    if tree is None:
        return None, None
    siblings = [tree.children(node) for node in (-1, *request.path)]
    ranks = (among.index(node) + 1 for among, node in zip(siblings, request.path, strict=False))
    return tuple(ranks), tuple(map(len, siblings))
