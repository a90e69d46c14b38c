"""What a trace says of a profile, on a simulated server whose times are planted."""

from __future__ import annotations

import pytest

from forerun.control.base import Plan
from forerun.control.fixed import FixedController
from forerun.errors import InvalidTrace
from forerun.plan.costs import DraftCosts
from forerun.plan.simulation.comparison import simulate
from forerun.plan.simulation.config import Phase, SimulatedServerConfig, Workload
from forerun.plan.simulation.correction import CostCorrection, corrected, correction_of
from forerun.plan.simulation.kinds import Constant, Fixed, Poisson, Uniform
from forerun.plan.simulation.times import Times
from forerun.plan.simulation.traffic import traffic_of
from forerun.theory.cost import CostTable
from forerun.theory.cost_line import CostLine
from forerun.theory.reading_cost import ReadingCost

TABLE = CostTable(
    lines=tuple(
        CostLine(
            batch=batch,
            rows=(1, 4),
            verify_s=(0.009 * batch, 0.015 * batch),
            plain_s=0.010 * batch,
            draft_s=0.001 * batch,
            overhead_ks=(1, 3),
            overhead_s=(0.0005, 0.0015),
            overhead_error_s=(0.0001, 0.0),
            plain_error_s=0.001,
        )
        for batch in (1, 4)
    )
)
COSTS = DraftCosts(
    greedy=TABLE,
    sampled=TABLE,
    reading=ReadingCost(tokens=(1, 64), target_s=(0.009, 0.07), draft_s=(0.001, 0.002)),
)
PLANTED = CostCorrection(plain=1.3, cycle=0.8, reading=2.0)
WORKLOAD = Workload(
    requests=12,
    arrivals=Poisson(rate_per_s=1.0),
    prompt_tokens=Uniform(least=8, most=64),
    output_tokens=Fixed(tokens=24),
    phases=(Phase(share=1.0, acceptance=Constant(alpha=0.5)),),
    server=SimulatedServerConfig(max_batch=4, max_k=3),
)


class Alternating(FixedController):
    """Drafts in every other step, and keeps what it is told."""

    def __init__(self):
        super().__init__(3)
        self.told = []
        self.num_steps = 0

    def decide(self, states, capacity):
        self.num_steps += 1
        plans = super().decide(states, capacity)
        return plans if self.num_steps // 4 % 2 else [Plan()] * len(plans)

    def observe(self, records):
        self.told.extend(records)


def served(costs):
    controller = Alternating()
    times = Times(costs.at(0), costs.reading)
    found = simulate(WORKLOAD, traffic_of(WORKLOAD, 1), times, controller, "c")
    return found, controller.told


@pytest.mark.usefixtures("unchecked")
def test_planted_factors_are_found():
    _, told = served(corrected(COSTS, PLANTED))
    found = correction_of(told, COSTS, 0, "t")
    assert found.plain == pytest.approx(PLANTED.plain, rel=1e-6)
    assert found.reading == pytest.approx(PLANTED.reading, rel=1e-6)
    # A draft that was left out for a few steps reads what it has missed, which no cycle says.
    assert found.cycle == pytest.approx(PLANTED.cycle, rel=0.05)


@pytest.mark.usefixtures("unchecked")
def test_a_profile_that_is_right_stays_as_it_is():
    _, told = served(COSTS)
    found = correction_of(told, COSTS, 0, "t")
    assert found.plain == pytest.approx(1.0)
    assert found.reading == pytest.approx(1.0)
    assert found.cycle == pytest.approx(1.0, rel=0.05)


def test_an_idle_server_is_not_a_slow_one():
    """Half of the cycles before a pause would look as long as the pause."""
    found, told = served(COSTS)
    assert found.busy_share < 0.7
    assert correction_of(told, COSTS, 0, "t").plain == pytest.approx(1.0)


def test_what_was_not_seen_is_off_like_all_others():
    _, told = served(corrected(COSTS, CostCorrection(plain=1.5, cycle=1.5, reading=1.5)))
    plain = [record for record in told if not record.num_drafted]
    apart = [r for r in plain if r.num_prefill_rows == 0]
    found = correction_of(apart, COSTS, 0, "t")
    assert found.plain == pytest.approx(1.5)
    assert found.cycle == pytest.approx(1.5)
    assert found.reading == pytest.approx(1.5)


def test_a_trace_without_steps_is_refused():
    with pytest.raises(InvalidTrace, match="the trace t"):
        correction_of([], COSTS, 0, "t")


def test_errors_keep_their_share_and_unmeasured_reading_stays_unmeasured():
    found = corrected(DraftCosts(greedy=TABLE, sampled=TABLE), PLANTED)
    assert found.reading is None
    (line, _) = found.greedy.lines
    assert line.plain_error_s / line.plain_s == pytest.approx(0.1)
    assert line.verify_s == pytest.approx((0.8 * 0.009, 0.8 * 0.015))
    assert line.overhead_s == pytest.approx((0.8 * 0.0005, 0.8 * 0.0015))
    assert line.overhead_error_s == pytest.approx((0.8 * 0.0001, 0.0))
