"""The coarse mode beside the fine one, which is cycle by cycle."""

from __future__ import annotations

from statistics import fmean

import pytest

from forerun.errors import InvalidRequest
from forerun.plan.costs import DraftCosts
from forerun.plan.simulation.coarse import num_steps_of
from forerun.plan.simulation.comparison import ControllerComparison
from forerun.plan.simulation.config import Phase, SimulatedServerConfig, Workload
from forerun.plan.simulation.kinds import Clustered, Constant, Fixed, Poisson, Uniform
from forerun.plan.simulation.traffic import traffic_of
from forerun.theory.cost import CostTable
from forerun.theory.cost_line import CostLine

TABLE = CostTable(
    lines=tuple(
        CostLine(
            batch=batch,
            rows=(1, 2, 64),
            verify_s=tuple(0.010 + 0.0005 * batch * (rows - 1) for rows in (1, 2, 64)),
            plain_s=0.011,
            draft_s=0.001,
            overhead_ks=(1, 3, 6),
            overhead_s=(0.001, 0.003, 0.001),
        )
        for batch in (1, 4)
    )
)
COSTS = DraftCosts(greedy=TABLE, sampled=TABLE)
WORK = Workload(
    requests=400,
    arrivals=Poisson(rate_per_s=1.5),
    prompt_tokens=Fixed(tokens=16),
    output_tokens=Uniform(least=60, most=180),
    phases=(Phase(share=1.0, acceptance=Clustered(alpha=0.7, spread=0.1)),),
    server=SimulatedServerConfig(max_batch=4, max_k=6),
)

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.parametrize("name", ["plain", "fixed:3", "fixed:6"])
def test_both_modes_agree(name):
    fine = ControllerComparison(WORK, COSTS, seed=1).run(name)
    coarse = ControllerComparison(WORK, COSTS, seed=1, coarse=True).run(name)
    assert coarse.num_tokens == fine.num_tokens
    assert coarse.num_requests == fine.num_requests
    for mine, its in (
        (coarse.total_s, fine.total_s),
        (coarse.busy_s, fine.busy_s),
        (coarse.decode_s, fine.decode_s),
        (coarse.tpot_s.p50, fine.tpot_s.p50),
    ):
        assert mine == pytest.approx(its, rel=0.05)
    assert coarse.mean_batch == pytest.approx(fine.mean_batch, rel=0.1)
    assert coarse.phases[0].acceptance_length == pytest.approx(
        fine.phases[0].acceptance_length, rel=0.02
    )


def test_steps_of_a_request_have_the_mean_of_a_renewal_process():
    phases = (Phase(share=1.0, acceptance=Constant(alpha=0.5)),)
    work = Workload(
        requests=20_000, output_tokens=Fixed(tokens=101), phases=phases,
        server=SimulatedServerConfig(max_k=2),
    )  # fmt: skip
    steps = num_steps_of(traffic_of(work, 3), 2).tolist()
    # X is 1, 2, 3 with 1/2, 1/4, 1/4: E[X] = 1.75, E[X^2] = 3.75.
    assert fmean(steps) == pytest.approx((100 + (3.75 / 1.75 - 1) / 2) / 1.75, rel=1e-3)
    assert min(steps) >= 100 / 3


def test_what_learns_is_refused():
    with pytest.raises(InvalidRequest, match="no steps that goodput could learn from"):
        ControllerComparison(WORK, COSTS, seed=1, coarse=True).check(["plain", "goodput"])
    with pytest.raises(InvalidRequest, match="does not support overlap"):
        ControllerComparison(WORK, COSTS, seed=1, coarse=True, overlap="pearl").check(["plain"])
