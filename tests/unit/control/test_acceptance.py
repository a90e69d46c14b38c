"""Acceptance estimates: by position, by request, and pooled over similar requests."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from msgspec.structs import replace as changed
from tests.records import STEP

from forerun.control import acceptance
from forerun.control.acceptance import AcceptanceEstimates, Positions, first_children
from forerun.control.base import RequestState, Tree
from forerun.control.config import GoodputConfig
from forerun.theory.record import StepRecord

STATE = RequestState(request_id="r", num_committed=100, max_new=500, temperature=0.0)
LASTING = GoodputConfig(memory=1 - 1e-12, similar_strength=4.0)


def outcome(accepted: int, **changes) -> StepRecord:
    return changed(
        STEP,
        **{
            "request_id": "r",
            "method": "d",
            "k_budget": 1,
            "depth_drafted": 1,
            "num_accepted": accepted,
            "path_children": None,
            "path_ranks": None,
            **changes,
        },
    )


def positions(*steps: tuple[int, int], config: GoodputConfig = LASTING) -> Positions:
    found = Positions(config)
    for allowed, passed in steps:
        found.observe(allowed, passed)
    return found


def test_a_steady_rate_is_found():
    means = []
    for seed in range(40):
        generator, found = random.Random(seed), Positions(GoodputConfig())
        for _ in range(400):
            found.observe(1, int(generator.random() < 0.8))
        means += found.means(0.5, 1)
    assert sum(means) / len(means) == pytest.approx(0.8, abs=0.03)


def test_weights_fade_by_the_memory():
    found = positions((1, 1), (1, 0), config=GoodputConfig(memory=0.9))
    assert (*found.trials, *found.wins) == pytest.approx((1.9, 0.9))


def test_positions_are_observed_up_to_the_first_that_was_not_passed():
    found = positions((5, 2))
    assert (found.trials, found.wins) == ([1.0, 1.0, 1.0], [1.0, 1.0, 0.0])


def test_positions_that_were_not_allowed_have_the_mean_of_the_one_before():
    seen = positions((2, 2))
    assert len(seen.trials) == 2
    first, second, third = seen.means(0.5, 3)
    assert first == pytest.approx((0.5 * 4 + 1) / 5)
    assert second == pytest.approx((first * 4 + 1) / 5)
    assert third == second
    assert positions().means(0.6, 3) == [0.6] * 3


def test_rates_are_conditional_on_the_positions_before():
    steps = [(3, 3)] * 8 + [(3, 1)] * 8
    _, second, third = positions(*steps).means(0.5, 3)
    assert second == pytest.approx(0.5, abs=0.1)
    assert third == pytest.approx(0.8, abs=0.2)


def test_each_position_may_have_its_own_prior():
    assert positions((1, 1)).means_given([0.5, 0.2]) == [pytest.approx(3 / 5), 0.2]


def first_position(found: AcceptanceEstimates) -> float:
    return found.curve(STATE, "d", 4).survival[0]


@pytest.mark.parametrize("strength", [4.0, 30.0])
@pytest.mark.parametrize("num_own", [0, 1, 30, 100])
def test_the_prior_of_a_request_is_the_estimate_of_similar_requests(strength, num_own):
    """As if the request had drafted `strength` tokens that were accepted as often as theirs."""
    found = AcceptanceEstimates(replace(LASTING, similar_strength=strength))
    others, fresh = (replace(STATE, request_id=name) for name in ("other", "fresh"))
    for state in (STATE, others):
        found.curve(state, "d", 1)
    for _ in range(50):
        found.observe(outcome(0, request_id="other"))
    for _ in range(num_own):
        found.observe(outcome(1))
    (pool,) = found.curve(fresh, "d", 1).survival
    expected = (num_own + strength * pool) / (num_own + strength)
    assert first_position(found) == pytest.approx(expected)


def test_drafts_that_end_early_lower_what_is_drafted_and_what_is_accepted():
    found = AcceptanceEstimates(LASTING)
    found.curve(STATE, "d", 3)
    for _ in range(50):
        found.observe(outcome(2, k_budget=3, depth_drafted=3))
    assert found.curve(STATE, "d", 3).drafted == [1.0] * 3
    for _ in range(200):
        found.observe(outcome(1, k_budget=3, depth_drafted=1))
    curve = found.curve(STATE, "d", 3)
    assert curve.drafted == pytest.approx([1.0, 0.0, 0.0], abs=0.05)
    assert curve.survival == pytest.approx([1.0, 0.2, 0.0], abs=0.06)


def test_tokens_since_the_last_draft_are_counted():
    found = AcceptanceEstimates(GoodputConfig())
    method = outcome(1).method
    assert found.num_unread(STATE, method) == 100
    assert found.observe(outcome(1, context_tokens=100, num_emitted=2)) == 100
    later = replace(STATE, num_committed=130)
    assert found.num_unread(later, method) == 28
    assert found.num_unread(later, "another") == 130


def test_tags_without_end_do_not_take_memory_without_end(monkeypatch):
    monkeypatch.setattr(acceptance, "MAX_REMEMBERED", 50)
    found = AcceptanceEstimates(GoodputConfig())
    for number in range(100):
        found.curve(replace(STATE, request_id=f"r{number}", tags=(f"t{number}",)), "d", 1)
    assert len(found._pools) == len(found._requests) == 50


@pytest.mark.parametrize(
    ("ranks", "children", "expected"),
    [
        ((), (3,), (0, 1)),
        ((1, 2), (3, 2, 0), (1, 2)),
        ((1, 1), (3, 1, 0), (2, 2)),
        ((2,), (3, 4), (0, 1)),
        ((), (0,), (0, 0)),
    ],
)
def test_first_children_of_a_path_are_observed_as_a_chain_is(ranks, children, expected):
    assert first_children(ranks, children) == expected


def test_acceptance_of_later_children_is_learnt_from_paths():
    found = AcceptanceEstimates(GoodputConfig())
    found.curve(STATE, "d", 1)
    shape = Tree(num_nodes=3, depth=1, width=3)
    for step in range(400):
        rank = (1, 1, 2, 0, 1, 3, 1, 2, 1, 0)[step % 10]
        path = (rank,) if rank else ()
        path_children = (3, *(0 for _ in path))
        found.observe(outcome(len(path), path_ranks=path, path_children=path_children))
    survival = found.tree_survival(STATE, found.curve(STATE, "d", 1), "d", shape)
    assert survival == pytest.approx([0.5, 0.2, 0.1], abs=0.08)
