"""How far drafts get: what was not allowed is unobserved, and believed to be like its neighbour."""

from __future__ import annotations

import pytest

from forerun.theory.drift import Memory
from forerun.theory.posterior import Passing, Prospects

MEMORY = Memory(slow=0.999, fast=0.5, surprise=100.0)


def passing(*steps: tuple[int, int]) -> Passing:
    found = Passing(MEMORY, 4.0)
    for allowed, passed in steps:
        found.observe(allowed, passed)
    return found


def test_nothing_seen_is_the_prior_everywhere():
    assert passing().means(0.6, 3) == [0.6] * 3


def test_positions_are_seen_up_to_the_first_that_was_not_passed():
    assert [rate.trials for rate in passing((5, 2)).rates] == [1.0, 1.0, 1.0]
    assert [rate.wins for rate in passing((5, 2)).rates] == [1.0, 1.0, 0.0]


def test_positions_that_were_not_allowed_are_not_seen():
    seen = passing((2, 2))
    assert len(seen.rates) == 2
    first, second, third = seen.means(0.5, 3)
    assert first == pytest.approx((0.5 * 4 + 1) / 5)
    assert second == pytest.approx((first * 4 + 1) / 5)
    assert third == second


def test_rates_are_of_those_that_got_there():
    steps = [(3, 3)] * 8 + [(3, 1)] * 8
    _, second, third = passing(*steps).means(0.5, 3)
    assert second == pytest.approx(0.5, abs=0.1)
    assert third == pytest.approx(0.8, abs=0.2)


def test_means_follow_every_observation():
    found = passing((1, 1))
    before = found.means(0.5, 1)
    found.observe(1, 0)
    assert found.means(0.5, 1)[0] < before[0]


def test_others_may_say_what_is_believed_of_a_position():
    assert passing((1, 1)).means_given([0.5, 0.2]) == [pytest.approx(3 / 5), 0.2]


def test_a_change_weakens_what_is_believed_of_the_positions_behind():
    found = Passing(Memory(), 4.0)
    for _ in range(200):
        found.observe(3, 3)
    assert found.rates[2].trials > 40
    for _ in range(10):
        found.observe(3, 0)
    assert found.rates[2].trials < 10


def test_a_stop_rule_makes_positions_allowed_and_not_passed():
    prospects = Prospects(MEMORY, 4.0)
    prospects.observe(4, 2, 2)
    assert [rate.wins for rate in prospects.accepted.rates] == [1.0, 1.0, 0.0]
    assert [rate.wins for rate in prospects.drafted.rates] == [1.0, 1.0, 0.0]


def test_depths_are_only_counted_once_a_draft_ended_early():
    prospects = Prospects(MEMORY, 4.0)
    prospects.observe(3, 3, 1)
    assert not prospects.drafted.rates
    prospects.observe(3, 1, 1)
    assert prospects.drafted.rates
