"""Controllers by name."""

from __future__ import annotations

from typing import get_args

import pytest
from tests.simulated import Tables, table

from forerun.control.base import Controller
from forerun.control.config import CONTROLLER_NAMES, ControllerName
from forerun.control.goodput import GoodputController
from forerun.control.named import CONTROLLERS, ControllerInputs, build_controller

COSTS = {"d": Tables(table())}


@pytest.mark.parametrize("name", CONTROLLER_NAMES)
def test_every_name_is_a_controller(name):
    inputs = ControllerInputs(methods=("d",), num_speculative_tokens=4, costs=COSTS)
    assert isinstance(build_controller(name, inputs), Controller)


def test_names_are_those_of_the_settings():
    assert set(CONTROLLERS) == set(get_args(ControllerName))


@pytest.mark.parametrize("costs", [COSTS, {}])
def test_auto_is_built_with_and_without_costs(costs):
    inputs = ControllerInputs(methods=("d",), num_speculative_tokens=4, costs=costs)
    assert isinstance(build_controller("auto", inputs), GoodputController)
