"""The rules of transformers."""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as changed
from tests.records import STEP
from tests.simulated import CAPACITY

from forerun.control.base import Controller, Plan, RequestState
from forerun.control.heuristic import ConfidenceController, HeuristicController, best_threshold

STATE = RequestState(request_id="r", num_committed=5, max_new=50, temperature=1.0)


def outcome(k: int, accepted: int, **changes):
    return changed(STEP, request_id="r", k_budget=k, num_accepted=accepted, **changes)


def test_k_grows_by_two_and_shrinks_by_one():
    ours = HeuristicController("d", 9)
    ks = []
    for share in (1, 1, 1, 0, 0.5, 1):
        (plan,) = ours.decide([STATE], CAPACITY)
        k = plan.num_speculative_tokens
        ks.append(k)
        ours.observe([outcome(k, int(share * k))])
    assert ks == [5, 7, 9, 9, 8, 7]


def test_k_stays_at_least_one_and_is_of_one_request():
    ours = HeuristicController("d", 9, start_k=1)
    ours.observe([outcome(1, 0)])
    other = replace(STATE, request_id="s")
    ours.observe([outcome(1, 1)])
    plans = ours.decide([STATE, other], CAPACITY)
    assert [plan.num_speculative_tokens for plan in plans] == [3, 1]


def test_steps_without_a_draft_move_nothing():
    ours = HeuristicController("d", 9)
    ours.observe([outcome(0, 0)])
    assert ours.decide([STATE], CAPACITY) == [Plan.chain("d", 5)]


def test_confidence_starts_at_its_threshold():
    (plan,) = ConfidenceController("d", 20).decide([STATE], CAPACITY)
    assert plan.num_speculative_tokens == 20
    assert plan.stop.measure == "top_probability"
    assert plan.stop.threshold == 0.4


def test_confidence_learns_from_what_was_reached():
    ours = ConfidenceController("d", 20)
    for _ in range(5):
        ours.observe([outcome(3, 1, stop_values=(0.9, 0.3, 0.95))])
    assert ours.threshold == 0.9


def test_values_behind_the_first_rejection_change_nothing():
    thresholds = []
    for behind in (0.01, 0.99):
        ours = ConfidenceController("d", 20)
        for _ in range(5):
            ours.observe([outcome(3, 1, stop_values=(0.8, 0.3, behind))])
        thresholds.append(ours.threshold)
    assert thresholds[0] == thresholds[1]


def test_missing_a_right_token_is_three_times_as_bad_as_drafting_a_wrong_one():
    seen = [(0.9, True), (0.5, False), (0.4, True), (0.1, False)]
    assert best_threshold(seen) == 0.4
    assert best_threshold([(0.9, True), *[(0.5, False)] * 3, (0.4, True), (0.3, False)]) == 0.4
    assert best_threshold([(0.9, False), (0.2, True)]) == 0.2


def test_both_are_controllers():
    assert isinstance(HeuristicController("d", 4), Controller)
    assert isinstance(ConfidenceController("d", 4), Controller)
