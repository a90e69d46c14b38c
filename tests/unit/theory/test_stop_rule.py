"""Stop rules: which side of a threshold stops, and which thresholds mean something."""

from __future__ import annotations

import math

import pytest

from forerun.theory.stop_rule import StopRule


def test_high_entropy_and_low_probability_stop():
    entropy = StopRule(measure="entropy", threshold=1.5)
    assert [entropy.stops(value) for value in (0.0, 1.5, 1.51)] == [False, False, True]
    top = StopRule(measure="top_probability", threshold=0.4)
    assert [top.stops(value) for value in (0.39, 0.4, 1.0)] == [True, False, False]


@pytest.mark.parametrize("measure", ["entropy", "top_probability"])
def test_a_law_that_is_none_does_not_stop(measure):
    assert not StopRule(measure=measure, threshold=0.5).stops(math.nan)


@pytest.mark.parametrize(
    ("measure", "threshold"),
    [("entropy", -0.1), ("entropy", math.nan), ("top_probability", 1.1), ("top_probability", -1.0)],
)
def test_thresholds_that_mean_nothing_are_refused(measure, threshold):
    with pytest.raises(ValueError, match=measure):
        StopRule(measure=measure, threshold=threshold)


def test_no_entropy_is_too_much_for_an_infinite_threshold():
    assert not StopRule(measure="entropy", threshold=math.inf).stops(1e9)
