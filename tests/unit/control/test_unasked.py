"""Plain plans are followed without asking for as long as all of them say, by the same requests."""

from __future__ import annotations

import pytest

from forerun.control.base import Capacity, Chain, Plan
from forerun.control.unasked import Unasked

PATIENT = Plan(num_steps=3)


def test_as_many_steps_as_the_least_patient_plan_says():
    ours = Unasked(64)
    assert not ours.goes_on(["a", "b"])
    ours.follow(["a", "b"], [PATIENT, Plan(num_steps=2)])
    assert [ours.goes_on(["a", "b"]) for _ in range(3)] == [True, False, False]
    assert ours.capacity == Capacity(max_rows=64, num_steps=2)


def test_others_are_asked_about():
    ours = Unasked(64)
    ours.follow(["a", "b"], [PATIENT, PATIENT])
    assert not ours.goes_on(["a"])
    assert not ours.goes_on(["a", "b"])  # who comes back is asked about


def test_where_somebody_was_not_asked_nothing_holds():
    ours = Unasked(64)
    ours.follow(["a", "b"], [PATIENT])
    assert not ours.goes_on(["a", "b"])


@pytest.mark.parametrize(
    "plan",
    [
        Plan(num_steps=0),
        Plan(num_steps=-3),
        Plan(method="d", shape=Chain(num_tokens=3), num_steps=4),
    ],
)
def test_only_plain_plans_for_several_steps_hold(plan):
    ours = Unasked(64)
    ours.follow(["a", "b"], [PATIENT, plan])
    assert not ours.goes_on(["a", "b"])


def test_a_plan_for_one_step_is_the_default():
    ours = Unasked(8)
    ours.follow(["a"], [Plan()])
    assert not ours.goes_on(["a"])
    assert ours.capacity == Capacity(max_rows=8)
