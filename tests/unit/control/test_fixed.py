"""The controller that always says K."""

from __future__ import annotations

from dataclasses import replace

from forerun.control.base import Capacity, Controller, Plan, RequestState, Tree
from forerun.control.named import FixedController


def state(max_new: int) -> RequestState:
    return RequestState(request_id="r", num_committed=5, max_new=max_new, temperature=1.0)


def plans(k: int, *max_new: int, max_rows: int = 1024) -> list[int]:
    chosen = (
        FixedController(k).decide([state(n) for n in max_new], Capacity(max_rows=max_rows)).plans
    )
    return [plan.num_speculative_tokens for plan in chosen]


def test_it_is_a_controller():
    assert isinstance(FixedController(3), Controller)


def test_everyone_is_asked_for_k():
    assert plans(4, 100, 3, 1) == [4, 4, 4]


def test_requests_share_the_rows_of_a_pass():
    assert plans(7, 100, 100, 3, max_rows=12) == [3, 3, 3]


def test_a_plan_without_drafts_is_plain():
    assert FixedController(4).decide([state(9)], Capacity(max_rows=1)).plans == [Plan()]
    assert FixedController(4, "suffix").decide([state(9)], Capacity(max_rows=64)).plans == [
        Plan.chain("suffix", 4)
    ]


def test_no_requests_no_plans():
    assert FixedController(4).decide([], Capacity(max_rows=64)).plans == []


def test_a_tree_loses_nodes_where_requests_share_the_rows_of_a_pass():
    tree = Tree(num_nodes=7, depth=3, width=4)
    controller = FixedController(tree, "d")
    assert controller.decide([state(9)], Capacity(max_rows=64)).plans == [
        Plan(method="d", shape=tree)
    ]
    cut = [Plan(method="d", shape=replace(tree, num_nodes=3))] * 2
    assert controller.decide([state(9)] * 2, Capacity(max_rows=9)).plans == cut
    assert controller.decide([state(9)], Capacity(max_rows=1)).plans == [Plan()]
