"""Draft trees in simulation: `auto` follows the faster of chains and trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.measure.profile import load_profile
from forerun.plan.simulation import simulate
from forerun.plan.workload import (
    Constant,
    Phase,
    SimulatedServerConfig,
    Uniform,
    Workload,
)
from forerun.theory.cost import DraftCosts

pytestmark = pytest.mark.usefixtures("unchecked")

PROFILES = Path(__file__).parents[3] / "benchmarks" / "profiles"
ARMS = ("plain", "fixed:1", "fixed:3", "fixed:5", "fixed:8", "tree:7,2,4", "tree:7,3,4")


@pytest.fixture(scope="module")
def costs() -> DraftCosts:
    return load_profile(PROFILES / "292m.json").costs


def compared(
    costs: DraftCosts,
    alpha: float,
    *names: str,
    seed: int = 1,
    max_k: int = 8,
):
    workload = Workload(
        requests=8,
        prompt_tokens=64,
        output_tokens=Uniform(least=200, most=300),
        phases=(Phase(share=1.0, acceptance=Constant(alpha=alpha)),),
        server=SimulatedServerConfig(max_batch=1, max_k=max_k),
        sibling_acceptance=0.4,
    )
    return {name: simulate(workload, costs, name, seed=seed).decode_s for name in names}


@pytest.mark.parametrize("alpha", [0.5, 0.9])
def test_goodput_follows_the_faster_shape(costs, alpha):
    seconds = compared(costs, alpha, *ARMS, "auto")
    best = min(ARMS, key=seconds.__getitem__)
    assert best.startswith("tree" if alpha == 0.5 else "fixed")
    assert seconds["auto"] <= 1.06 * seconds[best]


@pytest.mark.covering
@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.8])
@pytest.mark.parametrize("profile", ["292m", "shipped-pair"])
def test_auto_is_within_two_percent_of_the_best_shape(profile, alpha):
    """At most 4 levels; on the 292M pair trees of 11 nodes are best up to 0.7."""
    costs = load_profile(PROFILES / f"{profile}.json").costs
    arms = ("plain", "fixed:1", "fixed:3", "fixed:4", "tree:3,2,4", "tree:7,3,4", "tree:11,3,4")
    runs = [compared(costs, alpha, *arms, "auto", seed=seed, max_k=4) for seed in range(2)]
    seconds = {name: sum(run[name] for run in runs) for name in (*arms, "auto")}
    best = min(arms, key=seconds.__getitem__)
    assert (best == "tree:11,3,4") is (profile == "292m" and alpha < 0.8)
    assert seconds[best] / seconds["auto"] >= 0.98
