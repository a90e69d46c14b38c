"""Confidence against acceptance: what is learnt, and where the threshold comes to lie."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace
from tests.records import STEP

from forerun.control.base import RequestState
from forerun.control.calibration import Calibration
from forerun.control.goodput import tpot_limit_s


def fed(measure: str, *steps: tuple[tuple[float, ...], int], times: int = 40) -> Calibration:
    calibration = Calibration(measure)
    for values, accepted in steps * times:
        k = len(values)
        calibration.observe(
            replace(
                STEP,
                k_budget=k,
                num_drafted=k,
                depth_drafted=k,
                num_accepted=accepted,
                stop_values=values,
            )
        )
    return calibration


@pytest.mark.parametrize(
    ("measure", "sure", "unsure"), [("entropy", 0.05, 2.5), ("top_probability", 0.95, 0.1)]
)
def test_unsure_drafts_stop_where_they_are_seldom_right(measure, sure, unsure):
    rule = fed(measure, ((sure, sure), 2), ((sure, unsure), 1)).rule(0.3)
    assert rule.measure == measure
    assert rule.stops(unsure)
    assert not rule.stops(sure)


def test_unsure_drafts_go_on_where_they_are_right_all_the_same():
    rule = fed("top_probability", ((0.1, 0.3, 0.5, 0.7, 0.9), 5)).rule(0.5)
    assert not rule.stops(0.75)
    assert rule.threshold < 0.2


def test_the_dearer_a_node_the_surer_it_must_be():
    steps = [
        ((0.95, bin_ / 10), 2 if (bin_ + n) % 10 < bin_ else 1)
        for bin_ in (1, 3, 5, 7)
        for n in range(10)
    ]
    calibration = fed("top_probability", *steps, times=20)
    thresholds = [calibration.rule(needed).threshold for needed in (0.0, 0.2, 0.4, 0.6, 1.01)]
    assert thresholds == sorted(set(thresholds))
    assert thresholds[0] == 0.0
    assert thresholds[-1] < 1.0


def test_what_was_never_seen_does_not_stop():
    assert Calibration("top_probability").rule(0.9).threshold == 0.0
    assert not fed("top_probability", ((0.95,), 1)).rule(0.9).stops(0.1)


def test_what_lies_behind_the_first_rejection_is_not_counted():
    one = fed("top_probability", ((0.9, 0.1, 0.9), 1))
    other = fed("top_probability", ((0.9, 0.1, 0.1), 1))
    assert (one.trials, one.wins) == (other.trials, other.wins)


def test_a_rule_that_only_measures_never_stops():
    assert not Calibration("entropy").at(0.0).stops(1e9)
    assert not Calibration("top_probability").at(0.0).stops(0.0)


def test_entropies_are_read_as_confidence():
    assert Calibration("entropy").at(0.5).threshold == pytest.approx(math.log(2))


def state(**changes) -> RequestState:
    return RequestState(request_id="r", num_committed=1, max_new=10, temperature=0.0, **changes)


def test_a_time_limit_is_the_tighter_of_target_and_deadline():
    assert tpot_limit_s(state()) is None
    assert tpot_limit_s(state(tpot_target_s=0.03)) == 0.03
    assert tpot_limit_s(state(time_left_s=0.2)) == pytest.approx(0.02)
    assert tpot_limit_s(state(tpot_target_s=0.03, time_left_s=0.2)) == pytest.approx(0.02)
    assert tpot_limit_s(state(time_left_s=-1.0)) > 0.0
