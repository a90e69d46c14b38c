"""Whatever the workload and the plans: everybody gets every token, nobody gets more."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.control.base import Controller, Decision, Plan
from forerun.plan.simulation import Times, serve
from forerun.plan.workload import (
    Constant,
    Phase,
    Poisson,
    SimulatedServerConfig,
    Workload,
)
from forerun.theory.cost import CostLine, CostTable

TABLE = CostTable(
    lines=(
        CostLine(rows=(1, 4), verify_s=(1.0, 1.2), plain_s=1.05, draft_s=0.1, overhead_s=(0.02,)),
    )
)
LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=5).map(tuple)


class Erratic(Controller):
    """Any plan at all, and a look at everything it is told."""

    def __init__(self, depths, work):
        self.depths = depths
        self.work = work
        self.count = 0
        self.tokens: dict[str, int] = {}
        self.last_s = 0.0

    def decide(self, states, capacity):
        plans = []
        for state in states:
            assert state.max_new >= 1
            k = self.depths[self.count % len(self.depths)]
            self.count += 1
            plans.append(Plan.chain("draft_model" if k else "plain", k))
        return Decision(plans)

    def observe(self, records):
        for record in records:
            assert 1 <= record.num_emitted <= record.num_accepted + 1
            assert 0 <= record.num_accepted <= record.num_drafted
            assert record.batch_rows <= self.work.server.max_step_rows
            assert record.t_s >= self.last_s
            assert min(record.draft_s, record.verify_s, record.other_s) >= 0.0
            self.last_s = record.t_s
            name = record.request_id
            self.tokens[name] = self.tokens.get(name, 0) + record.num_emitted


@pytest.mark.usefixtures("unchecked")
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(1, 12),
    prompts=LENGTHS,
    outputs=LENGTHS,
    depths=st.lists(st.integers(0, 9), min_size=1, max_size=7),
    max_batch=st.integers(1, 4),
    chunk=st.integers(1, 9),
    seed=st.integers(0, 2**40),
)
def test_everybody_gets_every_token(count, prompts, outputs, depths, max_batch, chunk, seed):
    work = Workload(
        requests=count,
        arrivals=Poisson(rate_per_s=0.2),
        prompt_tokens=prompts,
        output_tokens=outputs,
        phases=(Phase(share=1.0, acceptance=Constant(alpha=0.6)),),
        server=SimulatedServerConfig(
            max_batch=max_batch, max_k=5, prefill_chunk=chunk, max_step_rows=max_batch * 6,
        ),
    )  # fmt: skip
    controller = Erratic(depths, work)
    found = serve(work, Times(TABLE), controller, seed=seed)
    wanted = {f"request-{i}": outputs[i % len(outputs)] for i in range(count)}
    assert controller.tokens == wanted
    assert found.num_tokens == sum(wanted.values())
    assert found.busy_share <= 1 + 1e-9
