"""Trees in the goodput controller: chosen where they pay, learnt from accepted paths, refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.simulated import CAPACITY, Tables, table

from forerun.control.allocation import TreeLevels, best_trees
from forerun.control.base import RequestState, Tree
from forerun.control.costs import OperatingPoint, StepTimes
from forerun.control.goodput import GoodputController
from forerun.theory.record import StepRecord

STATE = RequestState(request_id="r", num_committed=100, max_new=500, temperature=0.0)
COSTLY_PASSES = table(draft=0.3, row=0.01)


def record(step: int, **changes: object) -> StepRecord:
    fields = {
        "cycle_id": step,
        "t_s": 0.0,
        "request_id": "r",
        "step": step,
        "method": "d",
        "k_budget": 1,
        "num_drafted": 1,
        "depth_drafted": 1,
        "num_accepted": 0,
        "num_emitted": 1,
        "draft_s": 0.003,
        "verify_s": 0.01,
        "other_s": 0.0005,
        "batch_rows": 2,
        "num_prefill_rows": 0,
        "context_tokens": 100,
        "last_token_source": "recovered",
        "expected_accepted": 0.0,
    }
    return StepRecord(**(fields | changes))


def times(batch: int = 1) -> StepTimes:
    costs = COSTLY_PASSES if batch == 1 else table(batches=(1, batch))
    return StepTimes.read(costs, OperatingPoint(batch, 7, True), 8, 8)


def test_nodes_are_given_to_trees_until_a_row_costs_more_than_it_brings():
    survival = [0.5, 0.25, 0.12, 0.001, 0.0005]
    best = best_trees(TreeLevels("d", 1), [survival], times(), 8)
    assert best.depths == (3,)
    assert best.tokens == pytest.approx(1.87)
    assert best.step_s == pytest.approx(times().tree_s(1) + times().verify_s[3])
    assert best_trees(TreeLevels("d", 1), [survival], times(), 2).depths == (2,)


def test_trees_that_never_pay_leave_plain_decoding():
    best = best_trees(TreeLevels("d", 1), [[0.01, 0.01]], times(), 8)
    assert (best.depths, best.tree) == ((0,), None)


def test_requests_share_nodes_by_the_survival_of_each():
    best = best_trees(TreeLevels("d", 1), [[0.9, 0.05], [0.3, 0.25, 0.2]], times(2), 3)
    assert best.depths == (1, 2)


def controller(tree_methods=("d",)) -> GoodputController:
    ours = GoodputController({"d": Tables(COSTLY_PASSES)}, 8, tree_methods=tree_methods)
    for step in range(40):  # one token, accepted every other time
        ours.decide([STATE], CAPACITY)
        ours.observe([record(step, num_accepted=step % 2)])
    return ours


def shapes(ours: GoodputController, state: RequestState) -> set[type]:
    """Shapes of plans that are no probes, each decided anew."""
    found = set()
    for _ in range(12):
        ours._active, ours._plain_left = None, 0
        (plan,) = ours.decide([state], CAPACITY).plans
        if not plan.probe:
            found.add(type(plan.shape))
    return found


def test_a_tree_is_planned_where_draft_passes_are_costly_and_rows_cheap():
    assert shapes(controller(), STATE) == {Tree}


def test_chains_are_planned_for_drafters_and_verifiers_of_chains():
    assert Tree not in shapes(controller(tree_methods=()), STATE)
    assert Tree not in shapes(controller(), replace(STATE, allows_trees=False))
