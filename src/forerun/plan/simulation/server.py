"""Simulation of continuous batching by the engine's rules, with times from a cost table.

Cycle by cycle, as the engine steps: waiting requests join while there is a place, decoding ones get
their rows first, prompts share what is left, one pass serves all requests, and the controller
decides and observes as it does in the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from forerun.control.base import Capacity, Controller, Tree
from forerun.plan.simulation.config import SimulatedServerConfig
from forerun.plan.simulation.request import Records, SimulatedCycle, SimulatedRequest, States
from forerun.plan.simulation.result import SimulationTally
from forerun.theory.cost import CostTable, ReadingCost

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
        self.controller.observe(Records(cycle, emitting))
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
        cycle.verify_s = times.pass_s(cycle.num_decode_rows)
        cycle.other_s = times.overhead_s(len(drafting))

    def _num_decoding_tokens(self, decoding: Sequence[SimulatedRequest]) -> int:
        if len(decoding) == len(self.running):
            return self.num_tokens
        return sum([request.num_committed for request in decoding])

    def _plan(self, decoding: Sequence[SimulatedRequest]) -> None:
        """Set the controller's plans, limited to the tokens left and to the largest K."""
        max_k, max_tree_nodes = self.config.max_k, self.config.max_tree_nodes
        plans = self.controller.decide(States(decoding), self.capacity)
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
                request.finished_s = now_s
                tally.finish(request)
                self.num_tokens -= request.num_committed
                self.running.remove(request)
        tally.cycle(cycle, len(decoding))
