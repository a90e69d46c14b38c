"""Controllers by name."""

from __future__ import annotations

from typing import get_args

import pytest
from tests.simulated import Tables, table

from forerun.control.base import Controller
from forerun.control.config import CONTROLLER_NAMES, ControllerName
from forerun.control.fixed import FixedController
from forerun.control.named import CONTROLLERS, ControllerInputs, build_controller
from forerun.control.safety import SafeController
from forerun.errors import InvalidRequest

COSTS = {"d": Tables(table())}


@pytest.mark.parametrize("name", CONTROLLER_NAMES)
def test_every_name_is_a_controller(name):
    means = ControllerInputs(methods=("d",), num_speculative_tokens=4, costs=COSTS)
    assert isinstance(build_controller(name, means), Controller)


def test_names_are_those_of_the_settings():
    assert set(CONTROLLERS) == set(get_args(ControllerName))


def test_auto_is_fixed_where_costs_are_not_known():
    ours = build_controller("auto", ControllerInputs(methods=("d",), num_speculative_tokens=4))
    assert isinstance(ours, FixedController)
    assert (ours.method, ours.num_speculative_tokens) == ("d", 4)


def test_auto_is_safe_where_they_are():
    means = ControllerInputs(methods=("d",), num_speculative_tokens=4, costs=COSTS)
    assert isinstance(build_controller("auto", means), SafeController)


def test_goodput_without_costs_is_refused_by_name():
    means = ControllerInputs(methods=("d", "e"), num_speculative_tokens=4, costs=COSTS)
    with pytest.raises(InvalidRequest, match="needs to know what e costs"):
        build_controller("goodput", means)
