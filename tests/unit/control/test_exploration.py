"""Probes and explorers: how often, how many, and what ends them."""

from __future__ import annotations

from dataclasses import replace

from tests.records import STEP

from forerun.control.base import Plan
from forerun.control.config import GoodputConfig
from forerun.control.exploration import Exploration

PLAIN = Plan()
QUIET = GoodputConfig(explore=0.0, first_probe=4, probe_every=16)
DRAFTS = Plan(method="d", num_speculative_tokens=3)


def probes(exploration: Exploration, num_steps: int, accepted: int = 0) -> list[int]:
    """Steps that probed."""
    found = []
    for step in range(num_steps):
        (plan,) = exploration.varied([PLAIN], [9], ["d"], 9)
        if plan.num_speculative_tokens:
            assert plan.probe
            assert plan.num_speculative_tokens == 1
            found.append(step)
        exploration.observe(
            [replace(STEP, k_budget=plan.num_speculative_tokens, num_accepted=accepted)]
        )
    return found


def test_probes_get_rarer_the_longer_nothing_is_accepted():
    assert probes(Exploration(QUIET), 60) == [3, 11, 27, 43, 59]


def test_what_is_accepted_is_looked_at_again_at_once():
    assert probes(Exploration(QUIET), 8, accepted=1) == [3, 4, 5, 6, 7]


def test_idle_requests_probe_in_the_same_step():
    exploration = Exploration(QUIET)
    for _ in range(3):
        exploration.varied([PLAIN, DRAFTS, PLAIN], [9, 9, 9], ["d"], 20)
    first, drafting, last = exploration.varied([PLAIN, DRAFTS, PLAIN], [9, 9, 9], ["d"], 20)
    assert first.probe and last.probe
    assert drafting == DRAFTS


def test_no_probe_without_room():
    exploration = Exploration(QUIET)
    for _ in range(40):
        assert exploration.varied([PLAIN], [0], ["d"], 9) == [PLAIN]
        assert exploration.varied([PLAIN], [9], ["d"], 0) == [PLAIN]


def test_a_share_of_the_steps_drafts_deeper():
    exploration = Exploration(GoodputConfig(explore=0.1))
    plans = [exploration.varied([DRAFTS], [9], ["d"], 9)[0] for _ in range(2000)]
    deeper = [plan for plan in plans if plan != DRAFTS]
    assert 0.07 < len(deeper) / 2000 < 0.13
    assert {plan.num_speculative_tokens for plan in deeper} == {5}
    assert all(plan.probe for plan in deeper)


def test_other_drafters_get_their_turn():
    exploration = Exploration(GoodputConfig(explore=0.2))
    plans = [exploration.varied([DRAFTS], [3], ["d", "e"], 9)[0] for _ in range(300)]
    assert {plan.method for plan in plans} == {"d", "e"}
    assert all(plan.probe for plan in plans if plan.method == "e")
