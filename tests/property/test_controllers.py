"""What every controller owes, whatever happens: rows, contexts, everybody served, no look ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed
from tests.records import STEP
from tests.simulated import Tables, table

from forerun.control.base import Capacity, Controller, Plan, RequestState
from forerun.control.config import CONTROLLER_NAMES
from forerun.control.goodput import GoodputController
from forerun.control.named import FixedController
from forerun.theory.record import StepRecord

pytestmark = pytest.mark.usefixtures("unchecked")

MAX_K = 6
BATCHES = (1, 3)
COSTS = {"d": Tables(table(batches=BATCHES)), "e": Tables(table(batches=BATCHES, draft=0.01))}


def named(name: str) -> Callable[[], Controller]:
    fixed = FixedController(MAX_K, next(iter(COSTS)))
    return lambda: fixed if name == "fixed" else GoodputController(COSTS, MAX_K)


MAKERS: dict[str, Callable[[], Controller]] = {
    **{name: named(name) for name in CONTROLLER_NAMES},
    "without costs": lambda: GoodputController(dict.fromkeys(COSTS), MAX_K),
}

Fates = list[list[float]]
"""Per step and request: share of the drafted tokens that is accepted."""

UNIT = st.floats(0.0, 1.0)
FATES = st.lists(st.lists(UNIT, min_size=3, max_size=3), min_size=1, max_size=25)


def states_of(rooms: Sequence[int]):
    return [
        RequestState(
            request_id=f"r{at}",
            num_committed=100 + at,
            max_new=room,
            temperature=float(at % 2),
            tags=("t",) * at,
        )
        for at, room in enumerate(rooms)
    ]


def happened(plan: Plan, state: RequestState, accepted_share: float, cycle: int) -> StepRecord:
    k = max(0, min(plan.num_speculative_tokens, state.max_new - 1))
    accepted = round(accepted_share * k)
    return changed(
        STEP,
        cycle_id=cycle,
        request_id=state.request_id,
        method=plan.method,
        k_budget=k,
        num_drafted=k,
        depth_drafted=k,
        num_accepted=accepted,
        num_emitted=accepted + 1,
        draft_s=0.001 * k,
        num_prefill_rows=0,
    )


def played(
    controller: Controller,
    states: Sequence[RequestState],
    capacity: Capacity,
    fates: Fates,
) -> list[list[Plan]]:
    """The plans of a story."""
    told = []
    for cycle, fate in enumerate(fates):
        plans = controller.decide(states, capacity).plans
        told.append(plans)
        records = [
            happened(plan, state, each, cycle)
            for plan, state, each in zip(plans, states, fate, strict=False)
        ]
        controller.observe(records)
    return told


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=15)
@given(
    rooms=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    max_rows=st.integers(3, 40),
    fates=FATES,
)
def test_plans_fit_rows_and_limits_and_nobody_is_forgotten(name, rooms, max_rows, fates):
    states = states_of(rooms)
    capacity = Capacity(max_rows=max_rows)
    for plans in played(MAKERS[name](), states, capacity, fates):
        assert len(plans) == len(states)
        rows = sum(1 + plan.num_speculative_tokens for plan in plans)
        assert rows <= max_rows
        for plan in plans:
            assert 0 <= plan.num_speculative_tokens <= MAX_K
            assert (plan.num_speculative_tokens == 0) == (plan.method == "plain")
            assert plan.method in (*COSTS, "plain")


@pytest.mark.parametrize("name", ["auto", "without costs"])
@settings(max_examples=15)
@given(rooms=st.lists(st.integers(1, 9), min_size=1, max_size=3), fates=FATES)
def test_goodput_never_drafts_past_the_end_of_a_request(name, rooms, fates):
    states = states_of(rooms)
    for plans in played(MAKERS[name](), states, Capacity(max_rows=64), fates):
        for plan, room in zip(plans, rooms, strict=True):
            assert plan.num_speculative_tokens < room


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=10)
@given(fates=FATES)
def test_decisions_are_a_function_of_what_was_told(name, fates):
    states, capacity = states_of([30, 30, 30]), Capacity(max_rows=64)
    assert played(MAKERS[name](), states, capacity, fates) == played(
        MAKERS[name](), states, capacity, fates
    )
