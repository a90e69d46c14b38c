"""Draft trees in simulation: `goodput` follows the faster of chains and trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.errors import InvalidRequest
from forerun.plan.costs import DraftCosts
from forerun.plan.simulation.comparison import ControllerComparison
from forerun.plan.simulation.config import Phase, SimulatedServerConfig, Workload
from forerun.plan.simulation.kinds import Constant, Fixed, Uniform
from forerun.probe.profile import load_profile

pytestmark = pytest.mark.usefixtures("unchecked")

PROFILE = Path(__file__).parents[3] / "benchmarks" / "profiles" / "292m.json"
ARMS = ("plain", "fixed:1", "fixed:3", "fixed:5", "fixed:8", "tree:7,2,4", "tree:7,3,4")


@pytest.fixture(scope="module")
def costs() -> DraftCosts:
    return load_profile(PROFILE).costs


def compared(costs: DraftCosts, alpha: float, *names: str, overlap: str = "none"):
    workload = Workload(
        requests=8,
        prompt_tokens=Fixed(tokens=64),
        output_tokens=Uniform(least=200, most=300),
        phases=(Phase(share=1.0, acceptance=Constant(alpha=alpha)),),
        server=SimulatedServerConfig(max_batch=1, max_k=8),
        sibling_acceptance=0.4,
    )
    comparison = ControllerComparison(workload, costs, seed=1, overlap=overlap)
    comparison.check(names)
    return {name: comparison.run(name).decode_s for name in names}


@pytest.mark.parametrize("alpha", [0.5, 0.9])
def test_goodput_follows_the_faster_shape(costs, alpha):
    seconds = compared(costs, alpha, *ARMS, "goodput")
    best = min(ARMS, key=seconds.__getitem__)
    assert best.startswith("tree" if alpha == 0.5 else "fixed")
    assert seconds["goodput"] <= 1.06 * seconds[best]


def test_overlapped_schedules_refuse_trees(costs):
    with pytest.raises(InvalidRequest, match="chains only"):
        compared(costs, 0.5, "tree:7", overlap="pearl")
