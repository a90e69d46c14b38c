"""The bandit: every arm once, then mostly the best."""

from __future__ import annotations

import pytest
from tests.simulated import CAPACITY, World, best_rate, table

from forerun.control.bandit import BanditController
from forerun.control.base import Capacity, Controller

pytestmark = pytest.mark.usefixtures("unchecked")


def test_it_is_a_controller():
    assert isinstance(BanditController(["d"], 4), Controller)


def test_arms_are_all_k_that_there_is_room_for():
    ours = BanditController(["d", "e"], 4)
    assert [tuple(arm) for arm in ours.arms] == [
        ("plain", 0),
        *((method, k) for method in "de" for k in (1, 2, 3, 4)),
    ]


def test_every_arm_is_tried_before_any_again():
    ours = World(lambda *_: 0.5, {"d": table()})
    ours.run(BanditController(["d"], 8), 6)
    assert sorted(record.k_budget for record in ours.records) == [0, 1, 2, 3, 5, 8]


def test_it_finds_the_best_arm_and_leaves_it_when_it_is_not():
    costs = {"d": table()}
    ours = World(lambda _, __, step: 0.9 if step < 1000 else 0.0, costs, noise=0.05)
    ours.run(BanditController(["d"], 8), 2200)
    ks = [record.k_budget for record in ours.records]
    assert sum(k >= 5 for k in ks[500:1000]) > 350
    assert sum(k == 0 for k in ks[1700:]) > 350


def test_it_comes_close_to_the_best_fixed_k():
    ours = World(lambda *_: 0.7, {"d": table()}, noise=0.05)
    assert ours.run(BanditController(["d"], 8), 1500) > 0.9 * best_rate(0.7, table())


def test_arms_without_room_are_not_played():
    ours = BanditController(["d"], 8)
    world = World(lambda *_: 0.5, {"d": table()})
    for _ in range(10):
        (plan,) = ours.decide(world.states(), Capacity(max_rows=3))
        assert plan.num_speculative_tokens <= 2
        world.step(ours)
    assert ours.decide([], CAPACITY) == []
