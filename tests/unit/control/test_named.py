"""Controllers by name."""

from __future__ import annotations

import pytest
from tests.simulated import Tables, table

from forerun.control.base import Controller
from forerun.control.config import CONTROLLER_NAMES
from forerun.control.goodput import GoodputController
from forerun.control.named import ControllerInputs, FixedController, build_controller

COSTS = {"d": Tables(table())}
KINDS = {
    "auto": GoodputController,
    "fixed": FixedController,
}


@pytest.mark.parametrize("name", CONTROLLER_NAMES)
def test_every_name_is_a_controller(name):
    inputs = ControllerInputs(methods=("d",), num_speculative_tokens=4, costs=COSTS)
    assert type(build_controller(name, inputs)) is KINDS[name]
    assert isinstance(build_controller(name, inputs), Controller)


@pytest.mark.parametrize("costs", [COSTS, {}])
def test_auto_is_built_with_and_without_costs(costs):
    inputs = ControllerInputs(methods=("d",), num_speculative_tokens=4, costs=costs)
    assert isinstance(build_controller("auto", inputs), GoodputController)
