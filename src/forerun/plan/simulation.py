"""Simulate a server in simulated time, under one of the engine's own controllers.

Cycle by cycle, as the engine steps: waiting requests join while there is a place, decoding ones get
their rows first, prompts share what is left, one pass serves all requests, and the controller
decides and observes as it does in the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate

import numpy as np

from forerun.control.base import Capacity, Controller, DecisionReuse, Plan, RequestState, Tree
from forerun.control.config import CONTROLLER_NAMES
from forerun.control.costs import DrafterTraits
from forerun.control.goodput import GoodputController
from forerun.control.named import FixedController
from forerun.errors import InvalidRequest
from forerun.plan.workload import (
    SimulatedDraw,
    Workload,
    alphas_of,
    draw_arrivals,
    draw_lengths,
    key_of,
    number_phases,
    uniforms,
)
from forerun.theory.cost import CostTable, DraftCosts, ReadingCost
from forerun.theory.record import StepRecord
from forerun.theory.tree import TokenTree, static_tree

METHOD = "draft_model"
"""Name of the simulated drafter."""
PLAIN = Plan()


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedRequest:
    """The state of one simulated sequence from its arrival to its last token.

    Attributes:
        alphas: P(accepted | all before it accepted) by drafted position.
        text: one uniform number per output token; a draft token is accepted if it is below alpha.
            Whatever K is, a position has the same number, so a controller changes what is drafted
            and not what could have been accepted.
        depth: levels of the draft of the current step.
        num_nodes: its tokens, more than levels in a tree.
        num_new: tokens emitted in the current step.
        num_read: committed tokens that the draft has read.
        decode_s: seconds of all its decode steps; the next three are their counts.
    """

    name: str
    phase: int
    arrival_s: float
    num_prompt: int
    num_output: int
    num_unread: int
    alphas: tuple[float, ...]
    sibling_acceptance: float
    text: list[float]
    tags: tuple[str, ...] = ()
    plan: Plan = PLAIN
    tree: TokenTree | None = None
    path: tuple[int, ...] = ()
    depth: int = 0
    num_nodes: int = 0
    num_accepted: int = 0
    num_new: int = 0
    num_emitted: int = 0
    num_read: int = 0
    num_steps: int = 0
    first_s: float = 0.0
    ended_s: float = 0.0
    decode_s: float = 0.0
    num_decode_steps: int = 0
    total_depth: int = 0
    total_accepted: int = 0

    @property
    def num_committed(self) -> int:
        return self.num_prompt + self.num_emitted

    def draft(self, plan: Plan, max_nodes: int, max_depth: int) -> None:
        """Draft the shape of a plan, cut to `max_nodes` nodes and `max_depth` levels."""
        self.tree, self.plan, self.num_accepted = None, plan, 0
        depth, nodes = min(plan.shape.depth, max_depth), min(plan.shape.num_nodes, max_nodes)
        self.depth = self.num_nodes = min(depth, nodes)
        if isinstance(plan.shape, Tree) and self.depth > 0:
            ranks = self.ranks(0, plan.shape.width)
            self.tree = static_tree(ranks, nodes, depth, plan.shape.width)
            self.num_nodes, self.depth = len(self.tree.parents), max(self.tree.depths)
        if self.depth <= 0:
            self.depth, self.num_nodes, self.plan = 0, 0, PLAIN

    def ranks(self, level: int, width: int) -> tuple[float, ...]:
        """Return P(child accepted, given its parent is) for sibling ranks at a tree level."""
        first, share = self.alphas[level], self.sibling_acceptance
        return (first, *((1 - first) * (1 - share) ** at * share for at in range(width - 1)))

    def verify(self) -> int:
        """Accept a part of the draft; returns the emitted tokens: those accepted and one more."""
        if self.tree is not None:
            self.path = self.walk(self.tree)
            self.num_accepted = len(self.path)
            return self.num_accepted + 1
        start, accepted = self.num_emitted, 0
        while accepted < self.depth and self.text[start + accepted] < self.alphas[accepted]:
            accepted += 1
        self.num_accepted = accepted
        return accepted + 1

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


def draw_requests(workload: Workload, seed: int) -> list[SimulatedRequest]:
    """Return all requests of a workload in the order of their arrival."""
    count, max_k = workload.requests, workload.server.max_k
    phases = number_phases(workload.phases, count)
    alphas = [alphas_of(phase.acceptance, max_k) for phase in workload.phases]
    prompts = draw_lengths(workload.prompt_tokens, count, key_of(seed, SimulatedDraw.PROMPTS))
    outputs = draw_lengths(workload.output_tokens, count, key_of(seed, SimulatedDraw.OUTPUTS))
    arrivals = draw_arrivals(workload.arrivals, count, seed)
    return [
        SimulatedRequest(
            name=f"request-{index}",
            phase=phases[index],
            arrival_s=arrivals[index],
            num_prompt=prompts[index],
            num_unread=prompts[index],
            num_output=outputs[index],
            alphas=alphas[phases[index]],
            sibling_acceptance=workload.sibling_acceptance,
            text=uniforms(
                key_of(seed, SimulatedDraw.TEXT, index), outputs[index] + max_k + 1
            ).tolist(),
        )
        for index in range(count)
    ]


@dataclass(slots=True, kw_only=True)
class SimulatedCycle:
    """Holds the figures that all requests of a cycle share."""

    number: int
    started_s: float
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    num_rows: int = 0
    num_prefill_rows: int = 0

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s

    def record(self, request: SimulatedRequest) -> StepRecord:
        """Return what the engine would record of a request in this cycle."""
        depth, tree = request.depth, request.tree
        siblings = [] if tree is None else [tree.children(node) for node in (-1, *request.path)]
        ranks = (among.index(node) + 1 for among, node in zip(siblings, request.path, strict=False))
        last = "bonus" if request.num_accepted == depth else "recovered"
        return StepRecord(
            cycle_id=self.number,
            t_s=self.started_s,
            request_id=request.name,
            step=request.num_steps,
            method=request.plan.method,
            k_budget=request.plan.num_speculative_tokens,
            num_drafted=request.num_nodes,
            depth_drafted=depth,
            num_accepted=request.num_accepted,
            num_emitted=request.num_new,
            draft_s=self.draft_s,
            verify_s=self.verify_s,
            other_s=self.other_s,
            batch_rows=self.num_rows,
            num_prefill_rows=self.num_prefill_rows,
            context_tokens=request.num_committed - request.num_new,
            last_token_source=last if depth else "plain",
            expected_accepted=float(request.num_accepted),
            path_ranks=None if tree is None else tuple(ranks),
            path_children=None if tree is None else tuple(map(len, siblings)),
        )


CONTEXT_BUCKET = 64
"""Tokens of mean context that share one reading of the table."""


class CycleTimes:
    """Times of a cost table at one batch size and context; each is computed once.

    Attributes:
        draft_s: seconds of one more drafted level, by the number of sequences that draft it.
        overhead_s: seconds of a cycle beyond drafting and target pass, by its levels.
    """

    def __init__(self, table: CostTable, batch: int, context: int) -> None:
        self._batch = batch
        self._most_rows = max(line.rows[-1] for line in table.lines)
        self.plain_s = table.plain_step_s(context, batch)
        self.draft_s = [0.0, *(table.draft_token_s(context, b + 1) for b in range(batch))]
        self.overhead_s: Callable[[int], float] = cache(
            lambda depth: table.overhead_s(depth, context, batch)
        )
        self._even_s: Callable[[int], float] = cache(
            lambda rows: table.verify_step_s(rows, context, batch)
        )

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


class Times:
    """Holds cycle times by batch size and bucket of contexts, and the costs of reading."""

    def __init__(self, table: CostTable, reading: ReadingCost | None = None) -> None:
        self.reading = reading or _estimate_reading(table)
        self._at: Callable[[int, int], CycleTimes] = cache(
            lambda batch, context: CycleTimes(table, batch, context)
        )

    def at(self, batch: int, num_tokens: int) -> CycleTimes:
        """Return the times of cycles at a batch size and number of committed tokens."""
        bucket = num_tokens // (batch * CONTEXT_BUCKET)
        return self._at(batch, bucket * CONTEXT_BUCKET + CONTEXT_BUCKET // 2)


def _estimate_reading(table: CostTable) -> ReadingCost:
    """Estimate reading costs by verification of as many rows, which is an upper bound.

    The target is taken to read as it verifies, and the draft to read for as much less as a drafted
    token costs less than a plain step.
    """
    rows = table.lines[0].rows
    target_s = tuple(table.verify_step_s(num_rows) for num_rows in rows)
    draft_s = tuple(table.draft_cost() * seconds for seconds in target_s)
    return ReadingCost(tokens=rows, target_s=target_s, draft_s=draft_s)


def count_levels(requests: Sequence[SimulatedRequest]) -> list[int]:
    """Return the number of requests that draft at each level."""
    depths = [request.depth for request in requests]
    return [sum(depth > level for depth in depths) for level in range(max(depths))]


class Server:
    """Simulates the engine with one target and one drafter."""

    def __init__(self, workload: Workload, times: Times, controller: Controller) -> None:
        self.workload = workload
        self.config = workload.server
        self.times = times
        self.controller = controller
        self.decisions: DecisionReuse[SimulatedRequest] = DecisionReuse(
            controller, Capacity(max_rows=self.config.max_step_rows)
        )
        self.now_s = self.busy_s = 0.0
        self.num_cycles = self.num_decoding = 0
        self.waiting: deque[SimulatedRequest] = deque()
        self.running: list[SimulatedRequest] = []

    def serve(self, requests: Sequence[SimulatedRequest]) -> None:
        """Simulate requests, in order of arrival, from the first arrival to the last token.

        Every cycle reads some of a prompt or emits a token, so this ends.
        """
        coming = deque(requests)
        while coming or self.running or self.waiting:
            while coming and coming[0].arrival_s <= self.now_s:
                self.waiting.append(coming.popleft())
            while self.waiting and len(self.running) < self.config.max_batch:
                self.running.append(self.waiting.popleft())
            if self.running:
                self.step()
            else:
                self.now_s = coming[0].arrival_s

    def step(self) -> None:
        """Simulate one cycle."""
        decoding = [request for request in self.running if not request.num_unread]
        cycle = SimulatedCycle(number=self.num_cycles, started_s=self.now_s)
        if decoding:
            self._plan(decoding)
        num_rows = sum(1 + request.num_nodes for request in decoding)
        emitting = decoding + self._read_prompts(num_rows, cycle)
        cycle.num_rows = cycle.num_prefill_rows + num_rows
        num_tokens = sum(request.num_committed for request in decoding)
        times = self.times.at(max(1, len(decoding)), num_tokens)
        drafting = [request for request in decoding if request.depth]
        for request in emitting:
            request.num_new = self.verify(request) if request.depth else 1
        if drafting:
            self._catch_up(drafting, cycle)
            self.spend(cycle, times, drafting)
        else:
            within_s = min(times.pass_s(len(decoding)), times.plain_s)
            cycle.verify_s = within_s if decoding else 0.0
            cycle.other_s = times.plain_s - within_s
        if cycle.num_prefill_rows:
            reading = self.times.reading
            read_s = reading.target_more_s if decoding else reading.target_pass_s
            cycle.verify_s += read_s(cycle.num_prefill_rows)
        self._commit(decoding, emitting, cycle)
        if decoding and not self.decisions.is_observed:
            self.decisions.skip(cycle.total_s)
        else:
            self.controller.observe([cycle.record(request) for request in emitting])

    def verify(self, request: SimulatedRequest) -> int:
        """Verify a draft and return the number of emitted tokens."""
        return request.verify()

    def spend(
        self, cycle: SimulatedCycle, times: CycleTimes, drafting: Sequence[SimulatedRequest]
    ) -> None:
        """Add the durations of drafting, target pass and overhead to a cycle with drafts."""
        levels = count_levels(drafting)
        cycle.draft_s += sum(times.draft_s[b] for b in levels)
        if any(request.tree is not None for request in drafting):
            # Rows of a level beyond the first cost the draft what they cost the target.
            num_wide = sum((r.num_nodes - r.depth) / max(1, r.depth - 1) for r in drafting)
            wide = times.pass_s(len(drafting) + round(num_wide)) / times.pass_s(len(drafting))
            cycle.draft_s += (wide - 1.0) * sum(times.draft_s[b] for b in levels[1:])
        cycle.verify_s = times.pass_s(cycle.num_rows - cycle.num_prefill_rows)
        cycle.other_s = times.overhead_s(len(levels))

    def _plan(self, decoding: Sequence[SimulatedRequest]) -> None:
        """Set the controller's plans, limited to the tokens left and to the largest K."""
        max_k, max_tree_nodes = self.config.max_k, self.config.max_tree_nodes
        is_whole = len(decoding) == len(self.running)
        plans = self.decisions.plan(decoding, self._describe, is_whole=is_whole)
        for request, plan in zip(decoding, plans, strict=True):
            most = max_tree_nodes if isinstance(plan.shape, Tree) else max_k
            deepest = min(max_k, request.num_output - request.num_emitted - 1)
            if plan.shape.num_nodes > most or plan.shape.depth > deepest:
                self.decisions.end()
            request.draft(plan, most, deepest)

    def _describe(self, request: SimulatedRequest) -> RequestState:
        return RequestState(
            request_id=request.name,
            num_committed=request.num_committed,
            max_new=request.num_output - request.num_emitted,
            temperature=self.workload.temperature,
            tags=request.tags,
        )

    def _read_prompts(self, num_rows: int, cycle: SimulatedCycle) -> list[SimulatedRequest]:
        """Read prompts within the free rows of the pass; return requests with complete prompts."""
        budget = self.config.max_step_rows - num_rows
        complete = []
        for request in self.running:
            if request.num_unread and budget:
                fed = min(request.num_unread, self.config.prefill_chunk, budget)
                budget -= fed
                cycle.num_prefill_rows += fed
                request.num_unread -= fed
                if not request.num_unread:
                    complete.append(request)
        return complete

    def _catch_up(self, drafting: Sequence[SimulatedRequest], cycle: SimulatedCycle) -> None:
        """Let the draft read prompts and tokens that were committed without it."""
        for request in drafting:
            num_missed = request.num_committed - request.num_read
            if num_missed > 1:
                cycle.draft_s += self.times.reading.draft_more_s(num_missed)
            request.num_read = request.num_committed + request.num_new

    def _commit(
        self,
        decoding: Sequence[SimulatedRequest],
        emitting: Sequence[SimulatedRequest],
        cycle: SimulatedCycle,
    ) -> None:
        """Commit the emitted tokens of each request at the end of the cycle."""
        self.now_s += cycle.total_s
        self.busy_s += cycle.total_s
        self.num_cycles += 1
        self.num_decoding += len(decoding)
        for request in decoding:
            request.decode_s += cycle.total_s
            request.num_decode_steps += 1
            request.total_depth += request.depth
            request.total_accepted += request.num_accepted
        for request in emitting:
            request.first_s = request.first_s if request.num_emitted else self.now_s
            request.num_emitted += request.num_new
            request.num_steps += 1
            if request.num_emitted >= request.num_output:
                request.ended_s = self.now_s
                self.running.remove(request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Mean and quantiles of seconds over requests."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: np.ndarray) -> Quantiles:
        p50, p99 = np.quantile(values, [0.5, 0.99])
        return cls(mean=float(values.mean()), p50=float(p50), p99=float(p99))


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """Counts of the decode steps of one phase.

    Attributes:
        num_tokens: emitted by its decode steps, so without the first of every request.
        num_drafted: levels of all drafts.
        decode_s: request-seconds of the steps, summed over the requests that waited for them.
    """

    num_steps: int
    num_tokens: int
    num_drafted: int
    num_accepted: int
    decode_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one controller on one workload.

    Attributes:
        total_s: seconds from the first arrival to the last token.
        busy_share: share of the time in which at least one request was served.
        mean_batch: decoding requests of a cycle.
        ttft_s: seconds to the first token, waiting included.
        tpot_s: seconds per token after it, mean of each request.
        num_in_slo: requests within their service level.
    """

    controller: str
    num_requests: int
    num_tokens: int
    total_s: float
    tokens_per_s: float
    goodput_per_s: float
    busy_share: float
    num_cycles: int
    mean_batch: float
    ttft_s: Quantiles
    tpot_s: Quantiles
    num_in_slo: int
    phases: tuple[PhaseResult, ...]

    @property
    def decode_s(self) -> float:
        """Return the sum over decode steps of their duration times the number of their requests."""
        return sum(phase.decode_s for phase in self.phases)

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def summarise(
    controller: str, workload: Workload, server: Server, requests: Sequence[SimulatedRequest]
) -> Result:
    """Return the figures of requests that a server has served."""
    times_s = [(r.arrival_s, r.first_s, r.ended_s, r.num_output) for r in requests]
    arrival_s, first_s, ended_s, num_output = np.array(times_s).T
    ttft_s = first_s - arrival_s
    tpot_s = (ended_s - first_s) / np.maximum(1, num_output - 1)
    limits = ((ttft_s, workload.slo.ttft_s), (tpot_s, workload.slo.tpot_s))
    within = [seconds <= limit for seconds, limit in limits if limit is not None]
    num_in_slo = int(np.all(within, axis=0).sum()) if within else len(requests)
    total_s, num_tokens = float(ended_s.max() - arrival_s.min()), int(num_output.sum())
    several = num_output > 1
    phases = ([r for r in requests if r.phase == n] for n in range(len(workload.phases)))
    return Result(
        controller=controller,
        num_requests=len(requests),
        num_tokens=num_tokens,
        total_s=total_s,
        tokens_per_s=num_tokens / total_s,
        goodput_per_s=num_in_slo / total_s,
        busy_share=server.busy_s / total_s,
        num_cycles=server.num_cycles,
        mean_batch=server.num_decoding / server.num_cycles,
        ttft_s=Quantiles.of(ttft_s),
        tpot_s=Quantiles.of(tpot_s[several] if several.any() else tpot_s),
        num_in_slo=num_in_slo,
        phases=tuple(
            PhaseResult(
                num_steps=sum(r.num_decode_steps for r in phase),
                num_tokens=sum(r.num_emitted - 1 for r in phase),
                num_drafted=sum(r.total_depth for r in phase),
                num_accepted=sum(r.total_accepted for r in phase),
                decode_s=sum(r.decode_s for r in phase),
            )
            for phase in phases
        ),
    )


def controller_of(name: str, workload: Workload, costs: DraftCosts) -> Controller:
    """Build a fresh controller from plain, fixed:K, tree:NODES, or a name of the engine's own.

    Raises:
        InvalidRequest: there is none of this name, or its K is above the workload's max_k.
    """
    kind, colon, argument = name.partition(":")
    max_k = workload.server.max_k
    if kind == "tree":
        return FixedController(Tree.parse(argument), METHOD)
    if name == "plain":
        return FixedController(0, METHOD)
    known = next((known for known in CONTROLLER_NAMES if known == kind), None)
    if known is None:
        raise InvalidRequest(
            f"controller {name!r} is unknown; use plain, fixed:K, tree:NODES, "
            f"{', '.join(CONTROLLER_NAMES)}"
        )
    if colon and (kind != "fixed" or not argument.isdecimal() or int(argument) > max_k):
        raise InvalidRequest(
            f"controller {name!r}: only fixed takes a K, from 0 to max_k, which is {max_k}"
        )
    k = int(argument) if colon else max_k
    if kind == "fixed":
        return FixedController(k, METHOD)
    reads_text = costs.reading is None or any(costs.reading.draft_s)
    return GoodputController(
        {METHOD: costs},
        k,
        tree_methods=(METHOD,) if workload.sibling_acceptance > 0.0 else (),
        max_tree_nodes=workload.server.max_tree_nodes,
        traits={METHOD: DrafterTraits(reads_text=reads_text)},
    )


def serve(
    workload: Workload, times: Times, controller: Controller, *, seed: int = 0, name: str = ""
) -> Result:
    """Serve the requests of a workload, cycle by cycle."""
    requests = draw_requests(workload, seed)
    server = Server(workload, times, controller)
    server.serve(requests)
    return summarise(name, workload, server, requests)


def simulate(workload: Workload, costs: DraftCosts, name: str, *, seed: int = 0) -> Result:
    """Serve a workload under the controller of a name, with the costs of a profile."""
    times = Times(costs.at(workload.temperature), costs.reading)
    return serve(workload, times, controller_of(name, workload, costs), seed=seed, name=name)
