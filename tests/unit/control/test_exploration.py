"""Probes and explorers: how often, how many, and what ends them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from forerun.control.base import Plan
from forerun.control.config import GoodputConfig
from forerun.control.exploration import EAGER, PROBE_DEPTH, Exploration

PLAIN = Plan()
JUST_READ = {0: 0}.__getitem__
QUIET = GoodputConfig(explore=0.0, probe_share=0.1)
DRAFTS = Plan(method="d", num_speculative_tokens=3)


def probes(
    exploration: Exploration, num_steps: int, loss: float, *, pays: bool = False
) -> list[int]:
    """Steps that probed, each of which lost so much."""
    steps = []
    for step in range(num_steps):
        (plan,) = exploration.varied([PLAIN], [9], JUST_READ, ["d"], 9)
        if plan.num_speculative_tokens:
            assert plan.probe
            assert plan.num_speculative_tokens == PROBE_DEPTH
            steps.append(step)
            exploration.observe(loss, pays=pays)
    return steps


@pytest.mark.parametrize("loss", [0.05, 0.5, 5.0])
def test_probes_cost_no_more_than_their_share(loss):
    exploration = Exploration(QUIET)
    probes(exploration, 100, loss)  # no longer eager
    num_steps = 2000
    spent = loss * len(probes(exploration, num_steps, loss))
    assert spent <= 0.1 * num_steps + loss
    if loss > 0.1:  # else every other step probes
        assert spent >= 0.08 * num_steps


def test_a_probe_is_paid_for_before_the_next_and_the_share_that_pays_halves():
    exploration = Exploration(GoodputConfig(explore=0.0, probe_share=1 / 16))
    first, second, *rest = probes(exploration, 80, loss=1.0)
    assert (first, second) == (0, pytest.approx(2 / EAGER, abs=1))
    waits = [after - before for before, after in pairwise([second, *rest])]
    assert waits == pytest.approx([16] * len(rest), abs=1)  # less than a step is carried over
    assert len(rest) > 2


def test_a_probe_that_pays_is_followed_by_the_next_at_once():
    assert probes(Exploration(QUIET), 8, loss=0.7, pays=True) == list(range(8))


def test_a_step_that_was_held_up_does_not_end_all_probing():
    exploration = Exploration(QUIET)
    exploration.observe(1000.0, pays=False)
    assert probes(exploration, 100, loss=0.5)


def test_after_a_time_of_drafting_probes_are_frequent_again():
    exploration = Exploration(GoodputConfig(explore=0.0, probe_share=0.01))
    rare = probes(exploration, 500, loss=1.0)
    for _ in range(50):
        assert exploration.varied([DRAFTS], [9], JUST_READ, ["d"], 9) == [DRAFTS]
    assert len(probes(exploration, 40, loss=1.0)) >= 3
    assert len([step for step in rare if step >= 200]) == 3


@pytest.mark.parametrize("share", [1 / 4, 1 / 2])
def test_nothing_is_due_before_it_is_said_to_be(share):
    """A controller that does not ask meanwhile misses nothing, and pays all the same."""
    asked, counted = (
        Exploration(GoodputConfig(explore=1 / 256, probe_share=share)) for _ in range(2)
    )
    plans, most = [PLAIN, DRAFTS], [9, 9]
    both = [0, 0].__getitem__
    rest = 1
    for _ in range(40):
        varied = asked.varied(plans, most, both, ["d"], 20, rest)
        for _ in range(rest - 1):
            assert counted.varied(plans, most, both, ["d"], 20) is plans
        assert counted.varied(plans, most, both, ["d"], 20) == varied
        for each in (asked, counted):
            if each.probed:
                each.observe(0.5, pays=False)
            elif each.explored is not None:
                each.pay(1 / 32)
        rest = asked.rest(plans, most, 1000)


def test_a_quarter_of_the_idle_requests_probe_those_with_least_to_catch_up_with():
    exploration = Exploration(QUIET)
    plans = [PLAIN, DRAFTS, PLAIN, PLAIN, PLAIN, PLAIN]
    varied = exploration.varied(plans, [9] * 6, [50, 0, 40, 3, 7, 60].__getitem__, ["d"], 20)
    assert [plan.probe for plan in varied] == [False, False, False, True, True, False]
    assert exploration.probed == [3, 4]
    assert varied[1] == DRAFTS


def test_probes_share_the_room_there_is():
    exploration = Exploration(QUIET)
    varied = exploration.varied([PLAIN] * 8, [9] * 8, ([0] * 8).__getitem__, ["d"], PROBE_DEPTH + 1)
    assert [plan.num_speculative_tokens for plan in varied] == [PROBE_DEPTH, 1, *[0] * 6]


def test_no_probe_without_room():
    exploration = Exploration(QUIET)
    for _ in range(40):
        assert exploration.varied([PLAIN], [0], JUST_READ, ["d"], 9) == [PLAIN]
        assert exploration.varied([PLAIN], [9], JUST_READ, ["d"], 0) == [PLAIN]


@pytest.mark.parametrize("loss", [0.05, 0.5])
def test_drafting_deeper_loses_no_more_than_its_share(loss):
    exploration = Exploration(GoodputConfig(explore=0.01))
    deeper = 0
    for _ in range(2000):
        (plan,) = exploration.varied([DRAFTS], [9], JUST_READ, ["d"], 9)
        if exploration.explored is not None:
            assert plan == replace(DRAFTS, num_speculative_tokens=4, probe=True)
            deeper += 1
            exploration.pay(loss)
    assert 0.009 * 2000 < deeper * loss <= 0.01 * 2000 + loss


def test_what_is_believed_to_be_as_good_is_tried_often_but_not_always():
    exploration = Exploration(GoodputConfig(explore=0.003))
    tried = 0
    for _ in range(1000):
        exploration.varied([DRAFTS], [9], JUST_READ, ["d"], 9)
        if exploration.explored is not None:
            tried += 1
            exploration.pay(0.0)
    assert 100 < tried < 200


def test_nobody_drafts_deeper_without_room_or_wish():
    for config, most, room in ((QUIET, 9, 9), (GoodputConfig(), 3, 9), (GoodputConfig(), 9, 3)):
        exploration = Exploration(config)
        for _ in range(40):
            assert exploration.varied([DRAFTS], [most], JUST_READ, ["d"], room) == [DRAFTS]
            assert exploration.explored is None


def test_other_drafters_get_their_turn():
    exploration = Exploration(GoodputConfig(explore=0.2))
    plans = []
    for _ in range(300):
        plans += exploration.varied([DRAFTS], [3], JUST_READ, ["d", "e"], 9)
        if exploration.explored is not None:
            exploration.pay(0.5)
    assert {plan.method for plan in plans} == {"d", "e"}
    assert all(plan.probe for plan in plans if plan.method == "e")
    assert 0.3 < sum(plan.probe for plan in plans) / 300 < 0.45
