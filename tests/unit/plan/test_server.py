"""Simulated serving, checked against sums worked out by hand and against the theory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from forerun.control.base import Chain, Decision
from forerun.control.named import FixedController
from forerun.plan.simulation import Times, serve, simulate
from forerun.plan.workload import (
    Constant,
    Phase,
    Poisson,
    SimulatedServerConfig,
    Slo,
    Uniform,
    Workload,
)
from forerun.theory.cost import CostLine, CostTable, DraftCosts, ReadingCost
from forerun.theory.record import StepRecord
from forerun.theory.speedup import acceptance_length, constant_acceptance_length

# A row costs 1 ms on top of 10, an engine 1 ms per step, a drafted token 2 ms, whatever the batch.
LINES = tuple(
    CostLine(
        batch=batch,
        rows=(1, 2, 64),
        verify_s=tuple(0.010 + 0.001 * batch * (rows - 1) for rows in (1, 2, 64)),
        plain_s=0.011,
        draft_s=0.002,
        overhead_s=(0.001,),
    )
    for batch in (1, 4)
)
TABLE = CostTable(lines=LINES)
COSTS = DraftCosts(greedy=TABLE, sampled=TABLE)


def workload(**changes):
    values = {
        "requests": 1,
        "prompt_tokens": 8,
        "output_tokens": 21,
        "phases": (Phase(share=1.0, acceptance=Constant(alpha=1.0)),),
        "server": SimulatedServerConfig(max_batch=4, max_k=8),
    }
    return Workload(**(values | changes))


def run(work, k=0, controller=None, seed=1):
    controller = controller or FixedController(k)
    return serve(work, Times(TABLE), controller, seed=seed)


BENT = CostTable(
    lines=tuple(
        replace(line, overhead_ks=(1, 3, 6), overhead_s=(0.001, 0.004, 0.002)) for line in LINES
    )
)


class Listening(FixedController):
    """Keeps what it is told."""

    is_observed = True

    def __init__(self, num_speculative_tokens):
        super().__init__(num_speculative_tokens)
        self.told = []

    def observe(self, records):
        self.told.extend(records)


def test_cycles_take_what_the_table_says_at_the_depth_that_is_drafted():
    drafted = set()
    for k in range(1, 9):
        controller = Listening(k)
        work = workload(phases=(Phase(share=1.0, acceptance=Constant(alpha=0.5)),))
        serve(work, Times(BENT), controller, seed=1)
        for record in controller.told:
            if record.num_drafted and record.step > 2:  # at first the draft reads the prompt
                cycle_s = record.draft_s + record.verify_s + record.other_s
                assert cycle_s == pytest.approx(BENT.cycle_s(record.depth_drafted))
                drafted.add(record.depth_drafted)
    assert drafted == set(range(1, 9))


def test_a_cycle_has_the_overhead_of_its_deepest_draft():
    class Uneven(Listening):
        def decide(self, states, capacity):
            plans, *_ = super().decide(states, capacity)
            return Decision(
                [replace(plan, shape=Chain(num_tokens=1 + 2 * n)) for n, plan in enumerate(plans)]
            )

    controller = Uneven(3)
    work = workload(requests=2, output_tokens=40)
    serve(work, Times(BENT), controller, seed=1)
    cycles = {}
    for record in controller.told:
        if record.num_drafted:
            cycles.setdefault(record.cycle_id, []).append(record)
    depths = set()
    for records in cycles.values():
        deepest = max(record.depth_drafted for record in records)
        assert records[0].other_s == pytest.approx(BENT.overhead_s(deepest, batch=len(records)))
        depths.add((len(records), deepest))
    assert (2, 3) in depths


def test_a_plain_request_takes_its_prompt_and_one_step_per_token():
    found = run(workload())
    prompt_s = 0.010 + 0.007 + 0.001
    assert found.ttft_s.p50 == pytest.approx(prompt_s)
    assert found.tpot_s.p50 == pytest.approx(0.011)
    assert found.total_s == pytest.approx(prompt_s + 20 * 0.011)
    assert found.num_cycles == 21
    assert found.phases[0].num_tokens == found.phases[0].num_steps


def test_measured_reading_is_what_prompts_take():
    reading = ReadingCost(tokens=(1, 9), target_s=(0.010, 0.012), draft_s=(0.001, 0.005))
    work = workload(arrivals=(0.0, 0.0), requests=2, output_tokens=7)
    found = serve(work, Times(TABLE, reading), FixedController(4), seed=1)
    # Both prompts in one pass, 16 tokens on a line through the two points; 1 ms beside it.
    assert found.ttft_s.p50 == pytest.approx(0.010 + 15 * 0.002 / 8 + 0.001)
    # Both drafts read 9 tokens for one each; then K=4, then the last token plainly.
    cycle_s = 4 * 0.002 + 0.010 + 8 * 0.001 + 0.001
    assert found.tpot_s.p50 * 6 == pytest.approx(2 * 0.004 + cycle_s + 0.011)


def test_prompts_beside_decoding_add_what_reading_adds():
    reading = ReadingCost(tokens=(1, 9), target_s=(0.010, 0.018), draft_s=(0.001, 0.001))
    work = workload(
        requests=2,
        arrivals=(0.0, 0.020),
        prompt_tokens=9,
        output_tokens=3,
    )
    found = serve(work, Times(TABLE, reading), FixedController(0), seed=1)
    # 19 ms of prompt; a step of 11 in which the second comes; 8 more for its prompt.
    assert found.total_s == pytest.approx(0.019 + 0.011 + 0.011 + 0.008 + 2 * 0.011)


def test_a_perfect_draft_emits_every_token_and_the_bonus():
    found = run(workload(), k=4)
    cycle_s = 4 * 0.002 + 0.010 + 0.004 + 0.001
    reading_s = 0.002 / 0.011 * 0.008  # the draft reads prompt and first token, 9 rows for 1
    assert found.phases[0].num_steps == 4
    assert found.total_s - found.ttft_s.p50 == pytest.approx(4 * cycle_s + reading_s)


def test_nothing_is_drafted_beyond_the_end():
    found = run(workload(output_tokens=7), k=4)
    # The first token comes with the prompt; 5 more with K=4; the last one plainly.
    assert (found.phases[0].num_steps, found.phases[0].num_drafted) == (2, 4)
    assert found.num_tokens == 7


def test_a_useless_draft_emits_one_token_per_step():
    bad = (Phase(share=1.0, acceptance=Constant(alpha=0.0)),)
    found = run(workload(phases=bad), k=4)
    assert found.phases[0].num_accepted == 0
    assert found.phases[0].num_steps == 20


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("k", [1, 3, 8])
def test_tokens_per_step_are_what_theory_says(k):
    for acceptance, tau in (
        (Constant(alpha=0.7), constant_acceptance_length(0.7, k)),
        (
            (0.8, 0.6, 0.3),
            acceptance_length([0.8, 0.6, 0.3, 0.15, 0.075, 0.0375, 0.01875, 0.009375][:k]),
        ),
    ):
        phases = (Phase(share=1.0, acceptance=acceptance),)
        work = workload(requests=40, output_tokens=1500, phases=phases)
        found = run(work, k=k).phases[0]
        assert found.num_tokens / found.num_steps == pytest.approx(tau, rel=0.02)


def test_a_batch_shares_its_passes():
    found = run(workload(requests=4, prompt_tokens=1), k=0)
    assert found.mean_batch == pytest.approx(4 * 20 / 21)
    prompts_s = 0.010 + 0.003 + 0.001  # four prompts of one token
    assert found.total_s == pytest.approx(prompts_s + 20 * 0.011)


def test_a_request_beyond_the_batch_waits():
    one = SimulatedServerConfig(max_batch=1, max_k=0)
    found = run(workload(requests=2, prompt_tokens=1, server=one))
    # The second waits for 21 steps of the first.
    assert found.ttft_s.p50 == pytest.approx((0.011 + 22 * 0.011) / 2)
    assert found.total_s == pytest.approx(42 * 0.011)


def test_decoding_goes_before_prompts_and_chunks_are_kept():
    server = SimulatedServerConfig(max_batch=2, max_k=1, prefill_chunk=4, max_step_rows=6)
    work = workload(requests=2, prompt_tokens=10, server=server)
    seen: list[tuple[int, int]] = []

    class Watching(FixedController):
        is_observed = True

        def observe(self, records):
            seen.extend((r.batch_rows, r.num_prefill_rows) for r in records)

    run(work, controller=Watching(0))
    # 4 + 2, 4 + 2, 2 + 4: only then has the first one been read; 1 + 2 is the rest of the second.
    assert seen[:3] == [(6, 6), (3, 2), (3, 2)]
    assert all(rows <= 6 for rows, _ in seen)


def test_an_idle_server_waits_for_the_next_arrival():
    work = workload(requests=2, arrivals=(0.0, 100.0))
    found = run(work)
    assert found.total_s == pytest.approx(100.0 + 0.018 + 20 * 0.011)
    assert found.busy_share == pytest.approx(2 * (0.018 + 20 * 0.011) / found.total_s)
    assert found.ttft_s.p99 == pytest.approx(0.018)


def test_promises_are_counted():
    work = workload(
        requests=2, server=SimulatedServerConfig(max_batch=1, max_k=0), slo=Slo(ttft_s=0.1)
    )
    assert run(work).num_in_slo == 1
    assert run(structs.replace(work, slo=Slo(ttft_s=9.0, tpot_s=0.012))).num_in_slo == 2
    assert run(structs.replace(work, slo=Slo(tpot_s=0.010))).num_in_slo == 0


def test_the_controller_is_told_what_the_engine_would_tell():
    told: list[StepRecord] = []
    asked = []

    class Watching(FixedController):
        def decide(self, states, capacity):
            asked.extend(states)
            return Decision(super().decide(states, capacity).plans)

        def observe(self, records):
            told.extend(records)

    phases = (Phase(share=1.0, acceptance=Constant(alpha=0.6)),)
    found = run(workload(requests=3, phases=phases, temperature=0.5), controller=Watching(3))
    assert {state.temperature for state in asked} == {0.5}
    first, *others = [record for record in told if record.request_id == "request-0"]
    assert (first.num_drafted, first.num_prefill_rows, first.num_emitted) == (0, 24, 1)
    committed = 8
    for step, record in enumerate([first, *others], start=1):
        assert record.step == step
        assert record.context_tokens == committed
        assert record.num_emitted == record.num_accepted + 1
        assert record.num_accepted <= record.num_drafted <= record.k_budget
        committed += record.num_emitted
    assert committed == 8 + 21
    states = [state for state in asked if state.request_id == "request-0"]
    assert [s.num_committed for s in states] == [r.context_tokens for r in others]
    cycles = {r.cycle_id: r.draft_s + r.verify_s + r.other_s for r in told}
    assert sum(cycles.values()) == pytest.approx(found.busy_share * found.total_s)


def test_the_same_seed_gives_the_same_result_and_another_does_not():
    phases = (Phase(share=1.0, acceptance=Constant(alpha=0.6)),)
    work = workload(
        requests=30,
        arrivals=Poisson(rate_per_s=3.0),
        output_tokens=Uniform(least=5, most=50),
        phases=phases,
    )
    assert run(work, 3).to_dict() == run(work, 3).to_dict()
    assert run(work, 3).total_s != run(work, 3, seed=2).total_s


@pytest.mark.usefixtures("unchecked")
def test_every_k_meets_the_same_text():
    """A larger K never accepts less of a text, step by step from the same position."""
    phases = (Phase(share=1.0, acceptance=Constant(alpha=0.6)),)
    work = workload(requests=20, output_tokens=300, phases=phases)
    steps = [run(work, k).phases[0].num_steps for k in range(9)]
    assert steps == sorted(steps, reverse=True)


def test_a_controller_is_run_by_its_name():
    work = workload(requests=3)
    assert (
        simulate(work, COSTS, "fixed:4", seed=3).decode_s < simulate(work, COSTS, "plain").decode_s
    )
