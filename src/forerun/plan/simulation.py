"""Simulate a server in simulated time: its steps and results, and the comparison of controllers.

Cycle by cycle, as the engine steps: waiting requests join while there is a place, decoding ones get
their rows first, prompts share what is left, one pass serves all requests, and the controller
decides and observes as it does in the engine.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import numpy as np

from forerun.control.base import Capacity, Controller, Tree
from forerun.control.config import CONTROLLER_NAMES
from forerun.control.costs import DrafterTraits
from forerun.control.goodput import GoodputController
from forerun.control.named import FixedController
from forerun.errors import InvalidRequest
from forerun.plan.costs import DraftCosts
from forerun.plan.workload import (
    LazySequence,
    SimulatedCycle,
    SimulatedRequest,
    SimulatedServerConfig,
    Slo,
    Traffic,
    Workload,
    record_of,
    traffic_of,
)
from forerun.theory.cost import CostTable, ReadingCost


@dataclass(slots=True, kw_only=True)
class SimulationTally:
    """Holds counts by phase, and the times of every request.

    Attributes:
        decode_s: request-seconds of decode steps, by phase.
        finished: of every finished request its arrival, its first and its last token in seconds,
            and the number of its tokens; in the order they finished.
    """

    num_phases: int
    tokens: list[int] = field(init=False)
    decode_s: list[float] = field(init=False)
    depths: list[Counter[int]] = field(init=False)
    accepted: list[int] = field(init=False)
    busy_s: float = 0.0
    num_cycles: int = 0
    num_decoding: int = 0
    finished: list[tuple[float, float, float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [0] * self.num_phases
        self.decode_s = [0.0] * self.num_phases
        self.depths = [Counter() for _ in range(self.num_phases)]
        self.accepted = [0] * self.num_phases

    def steps(self, requests: Sequence[SimulatedRequest], seconds: float) -> None:
        """Count the decode steps of one cycle."""
        tokens, decode_s, depths, accepted = self.tokens, self.decode_s, self.depths, self.accepted
        for request in requests:
            phase = request.phase
            tokens[phase] += request.num_new
            decode_s[phase] += seconds
            depths[phase][request.num_tested] += 1
            accepted[phase] += request.num_accepted

    def cycle(self, cycle: SimulatedCycle, num_decoding: int) -> None:
        self.busy_s += cycle.total_s
        self.num_cycles += 1
        self.num_decoding += num_decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Mean and quantiles of seconds over requests."""

    mean: float
    p50: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """Counts of the decode steps of one phase.

    Attributes:
        decode_s: request-seconds of the steps, summed over the requests that waited for them.
    """

    num_steps: int
    num_tokens: int
    decode_s: float
    num_accepted: int
    depths: dict[int, int] = field(default_factory=dict)

    @property
    def acceptance_length(self) -> float:
        """Return tau: the tokens per decode step."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def mean_k(self) -> float:
        """Return the tokens drafted per decode step."""
        drafted = sum(depth * count for depth, count in self.depths.items())
        return drafted / self.num_steps if self.num_steps else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one controller on one workload.

    Attributes:
        total_s: seconds from the first arrival to the last token.
        ttft_s: seconds to the first token, waiting included.
        tpot_s: seconds per token after it, mean of each request.
    """

    controller: str
    num_requests: int
    num_tokens: int
    total_s: float
    busy_s: float
    num_cycles: int
    mean_batch: float
    ttft_s: Quantiles
    tpot_s: Quantiles
    num_in_slo: int
    phases: tuple[PhaseResult, ...]

    @property
    def tokens_per_s(self) -> float:
        """Return the throughput, idle time included."""
        return self.num_tokens / self.total_s

    @property
    def busy_share(self) -> float:
        """Return the share of the time in which at least one request was served."""
        return self.busy_s / self.total_s

    @property
    def goodput_per_s(self) -> float:
        return self.num_in_slo / self.total_s

    @property
    def decode_s(self) -> float:
        """Return the sum over decode steps of their duration times the number of their requests."""
        return sum(phase.decode_s for phase in self.phases)

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {
            "tokens_per_s": self.tokens_per_s,
            "goodput_per_s": self.goodput_per_s,
            "busy_share": self.busy_share,
        }


def build_result(controller: str, tally: SimulationTally, slo: Slo) -> Result:
    arrival_s, first_s, finished_s, num_output = np.array(tally.finished).T
    ttft_s = first_s - arrival_s
    tpot_s = (finished_s - first_s) / np.maximum(1, num_output - 1)
    kept = np.ones(len(ttft_s), dtype=bool)
    if slo.ttft_s is not None:
        kept &= ttft_s <= slo.ttft_s
    if slo.tpot_s is not None:
        kept &= tpot_s <= slo.tpot_s
    several = num_output > 1
    return Result(
        controller=controller,
        num_requests=len(ttft_s),
        num_tokens=int(num_output.sum()),
        total_s=float(finished_s.max() - arrival_s.min()),
        busy_s=tally.busy_s,
        num_cycles=tally.num_cycles,
        mean_batch=tally.num_decoding / tally.num_cycles,
        ttft_s=quantiles(ttft_s),
        tpot_s=quantiles(tpot_s[several] if several.any() else tpot_s),
        num_in_slo=int(kept.sum()),
        phases=tuple(
            PhaseResult(
                num_steps=depths.total(),
                num_tokens=tokens,
                decode_s=decode_s,
                num_accepted=accepted,
                depths=dict(sorted(depths.items())),
            )
            for tokens, decode_s, depths, accepted in zip(
                tally.tokens, tally.decode_s, tally.depths, tally.accepted, strict=True
            )
        ),
    )


def quantiles(values: np.ndarray) -> Quantiles:
    p50, p99 = np.quantile(values, [0.5, 0.99])
    return Quantiles(mean=float(values.mean()), p50=float(p50), p99=float(p99))


CONTEXT_BUCKET = 64
"""Tokens of mean context that share one reading of the table."""


class CycleTimes:
    """Times of a cost table at one batch size and context, as plain numbers."""

    __slots__ = (
        "_batch", "_context", "_most_rows", "_overheads_s", "_rows_s", "_table", "draft_s",
        "plain_s",
    )  # fmt: skip

    def __init__(self, table: CostTable, batch: int, context: int) -> None:
        self._table = table
        self._batch = batch
        self._context = context
        self._most_rows = max(line.rows[-1] for line in table.lines)
        self._rows_s: dict[int, float] = {}
        self._overheads_s: dict[int, float] = {}
        self.plain_s = table.plain_step_s(context, batch)
        self.draft_s = [0.0, *(table.draft_token_s(context, b + 1) for b in range(batch))]
        """Seconds of one more drafted level, by the number of sequences that draft it."""

    def pass_s(self, num_rows: int) -> float:
        """Return the seconds of a target pass, interpolated between whole rows per sequence."""
        batch, most = self._batch, self._most_rows
        if num_rows <= batch:
            return self._even_s(1)
        if num_rows >= batch * most:  # from there on every line of the table is proportional
            return self._even_s(most) * num_rows / (batch * most)
        rows, rest = divmod(num_rows, batch)
        below = self._even_s(rows)
        return below + rest / batch * (self._even_s(rows + 1) - below) if rest else below

    def overhead_s(self, depth: int) -> float:
        """Return the seconds of a cycle with `depth` levels beyond drafting and target pass."""
        found = self._overheads_s.get(depth)
        if found is None:
            found = self._table.overhead_s(depth, self._context, self._batch)
            self._overheads_s[depth] = found
        return found

    def _even_s(self, rows: int) -> float:
        found = self._rows_s.get(rows)
        if found is None:
            found = self._table.verify_step_s(rows, self._context, self._batch)
            self._rows_s[rows] = found
        return found


class Times:
    """Holds cycle times by batch size and bucket of contexts."""

    def __init__(self, table: CostTable, reading: ReadingCost | None = None) -> None:
        self.table = table
        self.reading = reading or _reading_as_verified(table)
        self._found: dict[tuple[int, int], CycleTimes] = {}

    def at(self, batch: int, num_tokens: int) -> CycleTimes:
        """Return the times of cycles at a batch size and context."""
        bucket = num_tokens // (batch * CONTEXT_BUCKET)
        found = self._found.get((batch, bucket))
        if found is None:
            context = bucket * CONTEXT_BUCKET + CONTEXT_BUCKET // 2
            found = self._found[batch, bucket] = CycleTimes(self.table, batch, context)
        return found


def _reading_as_verified(table: CostTable) -> ReadingCost:
    """Estimate reading costs by verification of as many rows, which is an upper bound.

    The target is taken to read as it verifies, and the draft to read for as much less as a drafted
    token costs less than a plain step.
    """
    rows = table.lines[0].rows
    share = table.draft_cost()
    target_s = tuple(table.verify_step_s(num_rows) for num_rows in rows)
    draft_s = tuple(share * seconds for seconds in target_s)
    return ReadingCost(tokens=rows, target_s=target_s, draft_s=draft_s)


def _num_rows(decoding: Sequence[SimulatedRequest], drafting: Sequence[SimulatedRequest]) -> int:
    return len(decoding) + sum([request.num_nodes for request in drafting])


def levels(requests: Sequence[SimulatedRequest]) -> list[int]:
    """Return the number of requests that draft at each level."""
    depths = [request.depth for request in requests]
    if min(depths) == max(depths):
        return [len(depths)] * depths[0]
    return [sum(depth > level for depth in depths) for level in range(max(depths))]


class Server:
    """Simulates the engine with one target and one drafter."""

    def __init__(
        self,
        config: SimulatedServerConfig,
        times: Times,
        controller: Controller,
        tally: SimulationTally,
    ) -> None:
        self.config = config
        self.times = times
        self.controller = controller
        self.tally = tally
        self.capacity = Capacity(max_rows=config.max_step_rows)
        self.now_s = 0.0
        self.num_cycles = 0
        self.num_tokens = 0
        """Committed tokens of all running requests."""
        self.waiting: deque[SimulatedRequest] = deque()
        self.running: list[SimulatedRequest] = []

    def serve(self, requests: Sequence[SimulatedRequest]) -> None:
        """Simulate requests, in order of arrival, from the first arrival to the last token.

        Every cycle reads some of a prompt or emits a token, so this ends.
        """
        num_arrived, num_requests = 0, len(requests)
        max_batch = self.config.max_batch
        while num_arrived < num_requests or self.running or self.waiting:
            while num_arrived < num_requests and requests[num_arrived].arrival_s <= self.now_s:
                self.waiting.append(requests[num_arrived])
                num_arrived += 1
            while self.waiting and len(self.running) < max_batch:
                request = self.waiting.popleft()
                self.num_tokens += request.num_prompt
                self.running.append(request)
            if not self.running:
                self.now_s = requests[num_arrived].arrival_s
                continue
            self.step()

    def step(self) -> None:
        """Simulate one cycle."""
        running = self.running
        decoding = [request for request in running if not request.num_unread]
        cycle = SimulatedCycle(self.num_cycles, self.now_s)
        if decoding:
            self._plan(decoding)
        emitting = decoding
        if len(decoding) < len(running):
            emitting = decoding + self._read_prompts(decoding, cycle)
        drafting = [request for request in decoding if request.depth]
        times = self.times.at(max(1, len(decoding)), self._num_decoding_tokens(decoding))
        cycle.num_rows = cycle.num_prefill_rows + _num_rows(decoding, drafting)
        if drafting:
            gained = [self.advance(request) for request in decoding]
            self._catch_up(drafting, cycle)
            self.spend(cycle, times, drafting)
        else:
            gained = [1] * len(decoding)
            within_s = min(times.pass_s(len(decoding)), times.plain_s)
            cycle.verify_s = within_s if decoding else 0.0
            cycle.other_s = times.plain_s - within_s
        if cycle.num_prefill_rows:
            reading = self.times.reading
            read_s = reading.target_more_s if decoding else reading.target_pass_s
            cycle.verify_s += read_s(cycle.num_prefill_rows)
        self._commit(decoding, gained, emitting, cycle)
        self.controller.observe(LazySequence(partial(record_of, cycle), emitting))
        self.num_cycles += 1

    def advance(self, request: SimulatedRequest) -> int:
        """Verify a draft and return the number of emitted tokens: those accepted and one more."""
        request.num_tested = request.depth
        if request.tree is None:
            request.num_accepted = request.accepted_of(request.depth)
        else:
            request.path = request.walk(request.tree)
            request.num_accepted = len(request.path)
        return request.num_accepted + 1

    def spend(
        self, cycle: SimulatedCycle, times: CycleTimes, requests: Sequence[SimulatedRequest]
    ) -> None:
        """Add the durations of drafting, target pass and overhead to a cycle with drafts."""
        drafting = levels(requests)
        cycle.draft_s += sum(times.draft_s[b] for b in drafting)
        if any(request.tree is not None for request in requests):
            # Rows of a level beyond the first cost the draft what they cost the target.
            num_wide = sum((r.num_nodes - r.depth) / max(1, r.depth - 1) for r in requests)
            wide = times.pass_s(len(requests) + round(num_wide)) / times.pass_s(len(requests))
            cycle.draft_s += (wide - 1.0) * sum(times.draft_s[b] for b in drafting[1:])
        cycle.verify_s = times.pass_s(cycle.num_rows - cycle.num_prefill_rows)
        cycle.other_s = times.overhead_s(len(drafting))

    def _num_decoding_tokens(self, decoding: Sequence[SimulatedRequest]) -> int:
        if len(decoding) == len(self.running):
            return self.num_tokens
        return sum([request.num_committed for request in decoding])

    def _plan(self, decoding: Sequence[SimulatedRequest]) -> None:
        """Set the controller's plans, limited to the tokens left and to the largest K."""
        max_k, max_tree_nodes = self.config.max_k, self.config.max_tree_nodes
        plans = self.controller.decide(
            LazySequence(SimulatedRequest.state, decoding), self.capacity
        )
        for request, plan in zip(decoding, plans, strict=True):
            most = max_tree_nodes if isinstance(plan.shape, Tree) else max_k
            left = request.num_output - request.num_emitted - 1
            request.draft(plan, most, min(max_k, left))

    def _read_prompts(
        self, decoding: Sequence[SimulatedRequest], cycle: SimulatedCycle
    ) -> list[SimulatedRequest]:
        """Read prompts within the free rows of the pass; return requests with complete prompts."""
        drafting = [request for request in decoding if request.depth]
        budget = self.config.max_step_rows - _num_rows(decoding, drafting)
        if self.config.max_prefill_rows is not None:
            budget = min(budget, self.config.max_prefill_rows)
        done = []
        for request in self.running:
            if request.num_unread and budget:
                fed = min(request.num_unread, self.config.prefill_chunk, budget)
                budget -= fed
                cycle.num_prefill_rows += fed
                request.num_unread -= fed
                if not request.num_unread:
                    request.rest()
                    done.append(request)
        return done

    def _catch_up(self, drafting: Sequence[SimulatedRequest], cycle: SimulatedCycle) -> None:
        """Let the draft read prompts and tokens that were committed without it."""
        for request in drafting:
            num_missed = request.num_committed - request.num_read
            if num_missed > 1:
                cycle.draft_s += self.times.reading.draft_more_s(num_missed)
            request.num_read = request.num_committed

    def _commit(
        self,
        decoding: Sequence[SimulatedRequest],
        gained: Sequence[int],
        emitting: Sequence[SimulatedRequest],
        cycle: SimulatedCycle,
    ) -> None:
        """Commit the emitted tokens of each request at the end of the cycle."""
        seconds = cycle.total_s
        self.now_s = now_s = self.now_s + seconds
        tally = self.tally
        for request, num_new in zip(decoding, gained, strict=True):
            request.num_new = num_new
            request.num_emitted += num_new
            if request.depth:
                request.num_read += num_new
        tally.steps(decoding, seconds)
        for request in emitting[len(decoding) :]:
            request.num_new = request.num_emitted = 1
            request.first_s = now_s
        self.num_tokens += sum(gained) + len(emitting) - len(decoding)
        for request in emitting:
            request.num_steps += 1
            if request.num_emitted >= request.num_output:
                times_s = request.arrival_s, request.first_s, now_s
                tally.finished.append((*times_s, request.num_output))
                self.num_tokens -= request.num_committed
                self.running.remove(request)
        tally.cycle(cycle, len(decoding))


METHOD = "draft_model"
"""Name of the simulated drafter."""


def _controller_factory(
    name: str, costs: DraftCosts, max_k: int, *, has_trees: bool = False, max_tree_nodes: int = 0
) -> Callable[[], Controller]:
    """Return a function that builds a fresh controller for each run."""
    base, colon, argument = name.partition(":")
    if base == "tree":
        tree = Tree.parse(argument)
        return lambda: FixedController(tree, METHOD)
    base, argument = ("fixed", "0") if name == "plain" else (base, argument)
    kind = next((known for known in CONTROLLER_NAMES if known == base), None)
    if kind is None:
        raise InvalidRequest(
            f"controller {name!r} is unknown; use plain, fixed:K, tree:NODES, "
            f"{', '.join(CONTROLLER_NAMES)}"
        )
    k = max_k
    if argument or colon:
        if kind != "fixed" or not argument.isdecimal() or int(argument) > max_k:
            raise InvalidRequest(
                f"controller {name!r}: only fixed takes a K, from 0 to max_k, which is {max_k}"
            )
        k = int(argument)
    if kind == "fixed":
        return lambda: FixedController(k, METHOD)
    reads_text = costs.reading is None or any(costs.reading.draft_s)
    return lambda: GoodputController(
        {METHOD: costs},
        k,
        tree_methods=(METHOD,) if has_trees else (),
        max_tree_nodes=max_tree_nodes,
        traits={METHOD: DrafterTraits(reads_text=reads_text)},
    )


def simulate(
    workload: Workload, traffic: Traffic, times: Times, controller: Controller, name: str
) -> Result:
    """Serve the requests of a workload, cycle by cycle."""
    tally = SimulationTally(num_phases=len(workload.phases))
    server = Server(workload.server, times, controller, tally)
    server.serve([SimulatedRequest(traffic, i) for i in range(workload.requests)])
    return build_result(name, tally, workload.slo)


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """The best fixed K of every phase, found by simulating several fixed K.

    All requests of a phase meet the same texts under every controller, so request-seconds of their
    decode steps can be compared between runs.
    """

    ks: tuple[int, ...]
    decode_s: tuple[float, ...]

    def regret(self, result: Result) -> float:
        """Return how far a result's request-seconds exceed the oracle's, relative to the latter."""
        return result.decode_s / sum(self.decode_s) - 1.0

    def phase_regrets(self, result: Result) -> tuple[float, ...]:
        """Return by phase how far request-seconds exceed the oracle's, relative to the latter."""
        return tuple(
            phase.decode_s / best - 1.0 if best else 0.0
            for phase, best in zip(result.phases, self.decode_s, strict=True)
        )


class ControllerComparison:
    """Runs the same workload once under each of several controllers."""

    def __init__(self, workload: Workload, costs: DraftCosts, *, seed: int) -> None:
        self.workload = workload
        self.costs = costs
        self.traffic = traffic_of(workload, seed)
        self.times = Times(costs.at(workload.temperature), costs.reading)
        self._results: dict[str, Result] = {}

    def check(self, names: Iterable[str]) -> None:
        """Refuse unknown controllers before any run begins; raises InvalidRequest."""
        for name in names:
            _controller_factory(name, self.costs, self.workload.server.max_k)

    def run(self, name: str) -> Result:
        name = "plain" if name == "fixed:0" else name
        found = self._results.get(name)
        if found is None:
            server = self.workload.server
            make = _controller_factory(
                name,
                self.costs,
                server.max_k,
                has_trees=self.workload.sibling_acceptance > 0.0,
                max_tree_nodes=server.max_tree_nodes,
            )
            found = simulate(self.workload, self.traffic, self.times, make(), name)
            self._results[name] = found
        return found

    def oracle(self, ks: Iterable[int]) -> Oracle:
        """Return the oracle over several fixed K, which chooses one K per phase."""
        fixed = {k: self.run(f"fixed:{k}") for k in ks}
        best = [
            min((result.phases[phase].decode_s, k) for k, result in fixed.items())
            for phase in range(len(self.workload.phases))
        ]
        return Oracle(ks=tuple(k for _, k in best), decode_s=tuple(seconds for seconds, _ in best))
