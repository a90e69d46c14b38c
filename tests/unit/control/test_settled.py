"""Decisions that hold: for how long, and how often is asked meanwhile."""

from __future__ import annotations

import pytest

from forerun.control.base import Capacity, Plan, RequestState
from forerun.control.pricing import Allocation, Pricing
from forerun.control.settled import MOST_LONG, PLAIN_PATIENCE, ActivePlan
from forerun.control.unasked import Unasked

CAPACITY = Capacity(max_rows=64)
STATE = RequestState(request_id="r", num_committed=100, max_new=10**6, temperature=0.0)
MOST_LATE = PLAIN_PATIENCE // MOST_LONG
"""Steps by which it is decided late where the parts of a wait are not all needed in full."""


DRAFTS = Plan.chain("d", 2)


def settled(*plans: Plan, wish_s: float | None = None) -> ActivePlan:
    names = ["r", "s", "t"][: len(plans)]
    return ActivePlan(
        names=names,
        tpot_limits_s=[None] * (len(plans) - 1) + [wish_s],
        plans=list(plans),
        max_rows=CAPACITY.max_rows,
        patience=PLAIN_PATIENCE,
        candidates=[],
        pricing=Pricing({}),
        allocation=Allocation((0,), 1.0, 1.0, 0.0),
    )


def followed(ours: ActivePlan, rest: int) -> tuple[int, int]:
    """Steps before it is decided anew, and how often was asked, as controller and engine do it."""
    ours.hold(rest - 1)
    unasked, num_steps, num_asked = Unasked(CAPACITY.max_rows), 1, 1
    unasked.follow(["r"], ours.followed)
    while True:
        if not unasked.goes_on(["r"]):
            passed = unasked.capacity.num_steps
            if ours.steps_left < passed or not ours.holds([STATE], unasked.capacity):
                return num_steps, num_asked
            ours.steps_left -= passed
            unasked.follow(["r"], ours.followed)
            num_asked += 1
        num_steps += 1


@pytest.mark.parametrize("rest", range(1, PLAIN_PATIENCE + 1))
def test_what_is_due_is_not_late_however_long_it_takes(rest):
    num_steps, num_asked = followed(settled(Plan()), rest)
    assert rest <= num_steps < rest + MOST_LATE
    assert num_asked == -(-rest // MOST_LONG)


@pytest.mark.parametrize("rest", [1, 2, 8, 40])
@pytest.mark.parametrize("plans", [[DRAFTS], [Plan(), DRAFTS], [DRAFTS, Plan(), Plan()]])
def test_where_anybody_drafts_every_step_is_asked_about(rest, plans):
    ours = settled(*plans)
    ours.hold(rest - 1)
    assert ours.followed is ours.plans
    assert ours.steps_left == rest - 1


@pytest.mark.parametrize("rest", [1, 2, 8, 40])
def test_where_anybody_has_a_wish_every_step_is_asked_about(rest):
    """It may be late before the next step."""
    for plans in ([Plan()], [Plan(), Plan()]):
        ours = settled(*plans, wish_s=0.01)
        ours.hold(rest - 1)
        assert ours.followed is ours.plans


def test_what_does_not_hold_is_asked_about_at_once():
    ours = settled(Plan(), Plan())
    for num_steps in (20, 0):
        ours.hold(num_steps)
    assert ours.followed is ours.plans
