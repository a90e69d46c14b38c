"""recipes/numbers: three measured times, one set of parameters."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "numbers" / "explain.py"


@pytest.fixture(scope="module")
def explain():
    spec = importlib.util.spec_from_file_location("explain", RECIPE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["explain"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["explain"]


def test_the_page_shows_what_the_recipe_says():
    command = [sys.executable, RECIPE, "--check"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("fixed_share", [0.0, 0.3, 1.0])
def test_one_set_of_parameters_gives_all_three_times(explain, fixed_share):
    found = explain.explained(fixed_share)
    assert found.seconds(0, 0.0) == 5.0
    assert found.seconds(10, 0.0) == pytest.approx(6.2)
    assert found.seconds(5, found.alpha) == pytest.approx(2.1)
    assert 0.64 < found.alpha < 0.71


def test_a_fall_costs_what_tau_loses(explain):
    found = explain.explained()
    assert found.draft_cost == pytest.approx(0.024)
    # Worked out by hand: tau 1.65 and 1.35 at K = 1; 1 + .65 + .4225 and 1 + .35 + .1225 at 2.
    assert found.seconds(1, 0.35) / found.seconds(1, 0.65) == pytest.approx(1.65 / 1.35)
    assert found.seconds(2, 0.35) / found.seconds(2, 0.65) == pytest.approx(2.0725 / 1.4725)


@pytest.mark.usefixtures("unchecked")
def test_the_simulation_agrees(explain):
    found = explain.explained()
    for k, alpha in ((0, 0.0), (10, 0.0), (5, found.alpha), (3, 0.35)):
        assert explain.simulated_s(found, k, alpha, 100) == pytest.approx(
            found.seconds(k, alpha), rel=0.03
        )
