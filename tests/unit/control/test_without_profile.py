"""Without a profile `auto` learns what steps take, gives up a useless draft and finds it again."""

from __future__ import annotations

import logging

import pytest
from tests.simulated import World, best_rate, table

from forerun.control.goodput import GoodputController

pytestmark = pytest.mark.usefixtures("unchecked")


def auto():
    return GoodputController({"d": None}, 8)


def world(acceptance, **changes) -> World:
    return World(acceptance, {"d": table(**changes)}, noise=0.05)


@pytest.mark.parametrize("draft", [0.02, 0.1, 0.5])
def test_a_useless_draft_reaches_95_percent_of_plain_over_256_tokens(draft):
    ours = world(lambda *_: 0.02, draft=draft, row=0.1)
    assert ours.run(auto(), 256) >= 0.95 * best_rate(0.0, table())


def test_drafting_is_given_up_within_30_steps():
    ours = world(lambda *_: 0.02, draft=0.3)
    ours.run(auto(), 200)
    drafted = [record.k_budget > 0 for record in ours.records]
    assert sum(drafted[30:]) < 0.1 * len(drafted[30:])


@pytest.mark.parametrize("row", [0.02, 0.3])
def test_a_good_draft_comes_close_to_the_best_fixed_k(row):
    ours = world(lambda *_: 0.85, row=row)
    assert ours.run(auto(), 600) >= 0.92 * best_rate(0.85, table(row=row))


def test_a_draft_that_pays_again_is_used_again_within_200_steps_by_most():
    """One that probed just before it paid again, or was unlucky then, takes longer."""
    found = 0
    for seed in range(20):
        ours = World(
            lambda _, __, step: 0.85 if step < 200 or step >= 500 else 0.0,
            {"d": table()},
            noise=0.05,
            seed=seed,
        )
        ours.run(auto(), 900)
        drafts = [record.k_budget > 0 for record in ours.records]
        assert sum(drafts[100:200]) > 80
        assert sum(drafts[450:500]) < 10
        found += sum(drafts[700:]) > 0.8 * 200
    assert found >= 12


def test_giving_up_and_resuming_are_logged_once_each(caplog):
    with caplog.at_level(logging.INFO, logger="forerun.control"):
        ours = world(lambda _, __, step: 0.85 if 300 < step < 900 else 0.0)
        ours.run(auto(), 3000)
    stopped, resumed, again = [record.getMessage() for record in caplog.records]
    assert "slower than plain decoding" in stopped and again == stopped
    assert resumed == "drafting with d pays again and has resumed"


def test_plain_plans_are_reused(monkeypatch):
    """Reuse is what makes `decide` cheap; its time is in benchmarks/control/decision_cost.py."""
    ours, controller = world(lambda *_: 0.02, draft=0.5), auto()
    ours.run(controller, 300)
    decided = []
    decide = GoodputController._decide_anew
    monkeypatch.setattr(
        GoodputController, "_decide_anew", lambda *args: decided.append(1) or decide(*args)
    )
    ours.run(controller, 300)
    assert len(decided) <= 30
