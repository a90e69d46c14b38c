"""Steps that never happened: a controller against made-up acceptance and times."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from forerun.control.base import Capacity, Controller, DecisionReuse, Plan, RequestState
from forerun.theory.cost import CostLine, CostTable
from forerun.theory.record import StepRecord
from forerun.theory.speedup import constant_acceptance_length

CAPACITY = Capacity(max_rows=1024)

Acceptance = Callable[[str, str, int], float]
"""Method, request and its step, to the acceptance probability of every position."""


@dataclass(frozen=True)
class Tables:
    """The same table whatever the temperature."""

    table: CostTable

    def at(self, temperature: float) -> CostTable:
        return self.table


def table(
    *,
    draft: float = 0.1,
    row: float = 0.02,
    overhead: float | Mapping[int, float] = 0.05,
    batches: Sequence[int] = (1,),
    plain_s: float = 0.01,
) -> CostTable:
    """Costs in plain steps, overhead by K if it bends; rows cost the same whosever they are."""
    rows = (1, 2, 5, 9, 17)
    overheads = overhead if isinstance(overhead, Mapping) else {1: overhead}
    return CostTable(
        lines=tuple(
            CostLine(
                batch=batch,
                context=context,
                rows=rows,
                verify_s=tuple(plain_s * (1 + row * (batch * n - 1)) for n in rows),
                plain_s=plain_s * (1 + row * (batch - 1)),
                draft_s=plain_s * draft,
                overhead_ks=tuple(overheads),
                overhead_s=tuple(plain_s * share for share in overheads.values()),
            )
            for batch in batches
            for context in (0, 4096)
        )
    )


def best_rate(alpha: float, costs: CostTable, max_k: int = 8) -> float:
    """Tokens per second of one request under the best fixed K, by arithmetic."""
    return max(
        constant_acceptance_length(alpha, k) / costs.cycle_s(k, 100) for k in range(max_k + 1)
    )


def seconds_of(records: Sequence[StepRecord]) -> float:
    """What steps of one request took."""
    return sum(record.draft_s + record.verify_s + record.other_s for record in records)


@dataclass
class World:
    """What requests are like, and how long things take."""

    acceptance: Acceptance
    truth: dict[str, CostTable]
    names: Sequence[str] = ("r",)
    noise: float = 0.0
    seed: int = 0
    slow: float = 1.0
    draft_slow: float = 1.0
    read_s: float = 0.0
    num_prompt: int = 100
    num_output: int = 1 << 30
    clock_s: float = 0.0
    cycle: int = 0
    records: list[StepRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.lengths = dict.fromkeys(self.names, self.num_prompt)
        self.read: dict[tuple[str, str], int] = {}
        self.decisions: DecisionReuse[str] | None = None

    def state(self, name: str) -> RequestState:
        return RequestState(
            request_id=name,
            num_committed=self.lengths[name],
            max_new=min(4000, self.num_prompt + self.num_output - self.lengths[name]),
            temperature=1.0,
        )

    def states(self) -> list[RequestState]:
        return [self.state(name) for name in self.names]

    def step(self, controller: Controller) -> list[StepRecord]:
        """One step of all requests under the controller's plans."""
        if self.decisions is None or self.decisions.controller is not controller:
            self.decisions = DecisionReuse(controller, CAPACITY)
        plans = self.decisions.plan([*self.names], self.state, is_whole=True)
        if any(
            plan.shape.depth >= self.state(name).max_new
            for name, plan in zip(self.names, plans, strict=True)
        ):
            self.decisions.end()
        drafted = [(plan.method, plan.num_speculative_tokens) for plan in plans]
        draft_s, verify_s, other_s = self.times(drafted)
        draft_s += self.read_s * sum(
            self.lengths[name] - self.read.get((name, plan.method), 0)
            for name, plan in zip(self.names, plans, strict=True)
            if plan.num_speculative_tokens
        )
        records = [
            self.record(name, plan, draft_s, verify_s, other_s)
            for name, plan in zip(self.names, plans, strict=True)
        ]
        self.clock_s += draft_s + verify_s + other_s
        self.cycle += 1
        self.records += records
        if self.decisions.is_observed:
            controller.observe(records)
        else:
            self.decisions.skip(draft_s + verify_s + other_s)
        return records

    def times(self, drafted: Sequence[tuple[str, int]]) -> tuple[float, float, float]:
        batch = len(drafted)
        factor = self.random.lognormvariate(0.0, self.noise) if self.noise else 1.0
        factor *= self.slow
        used = {method for method, k in drafted if k}
        factor *= self.draft_slow if used else 1.0
        any_table = next(iter(self.truth.values()))
        if not used:
            return 0.0, any_table.plain_step_s(100, batch) * factor, 0.0
        draft_s = sum(
            self.truth[method].draft_token_s(
                100, sum(m == method and k > level for m, k in drafted)
            )
            for method in used
            for level in range(max(k for m, k in drafted if m == method))
        )
        num_nodes = sum(k for _, k in drafted)
        below, share = divmod(num_nodes / batch, 1)
        verify_s = (1 - share) * any_table.verify_step_s(int(below) + 1, 100, batch)
        if share:
            verify_s += share * any_table.verify_step_s(int(below) + 2, 100, batch)
        overhead_s = sum(
            self.truth[method].overhead_s(max(k for m, k in drafted if m == method), 100, batch)
            for method in used
        )
        return draft_s * factor, verify_s * factor, overhead_s * factor

    def record(
        self, name: str, plan: Plan, draft_s: float, verify_s: float, other_s: float
    ) -> StepRecord:
        k = plan.num_speculative_tokens
        accepted, before = 0, self.lengths[name]
        if k:
            alpha = self.acceptance(plan.method, name, self.cycle)
            while accepted < k and self.random.random() < alpha:
                accepted += 1
        self.lengths[name] += accepted + 1
        if k:
            self.read[name, plan.method] = self.lengths[name]
        return StepRecord(
            cycle_id=self.cycle,
            t_s=self.clock_s,
            request_id=name,
            step=self.cycle,
            method=plan.method,
            k_budget=k,
            num_drafted=k,
            depth_drafted=k,
            num_accepted=accepted,
            num_emitted=accepted + 1,
            draft_s=draft_s,
            verify_s=verify_s,
            other_s=other_s,
            batch_rows=k + 1,
            num_prefill_rows=0,
            context_tokens=before,
            last_token_source="bonus" if accepted == k else "recovered",
            expected_accepted=0.0,
        )

    def serve(self, controller: Controller, name: str) -> float:
        """Seconds of a new request, from its prompt to its last token."""
        self.names, self.lengths = (name,), {name: self.num_prompt}
        start_s = self.clock_s
        while self.lengths[name] < self.num_prompt + self.num_output:
            self.step(controller)
        return self.clock_s - start_s

    def run(self, controller: Controller, num_steps: int) -> float:
        """Tokens per second over so many steps."""
        start_s, before = self.clock_s, sum(self.lengths.values())
        for _ in range(num_steps):
            self.step(controller)
        return (sum(self.lengths.values()) - before) / (self.clock_s - start_s)
