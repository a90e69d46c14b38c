"""The gain from tallies: what a draft on trial would do to tokens per second."""

from __future__ import annotations

import pytest

from forerun.engine.shadow import RequestTally, TimedCount
from forerun.loop.gain import MIN_REQUESTS, measure_gain

K = 2


def tally(*, tokens=20.0, accepted=(0.8, 0.4), draft_s=0.01, spread=0.0, usual=1.0):
    """Ten live steps of 0.1 s with a draft of 0.02 s, and ten chains on trial."""
    return RequestTally(
        live=TimedCount(number=tokens + spread, seconds=1.0),
        rest={K: TimedCount(number=10.0, seconds=0.8)},
        chains={K: TimedCount(number=10.0, seconds=10 * draft_s)},
        usual_levels=TimedCount(number=20.0, seconds=0.2 * usual),
        trial_levels=TimedCount(number=20.0, seconds=0.2),
        weights=[10.0, 10 * accepted[0]],
        accepted=[10 * accepted[0], 10 * accepted[1]],
        has_ended=True,
    )


def test_the_gain_is_that_of_tokens_over_seconds():
    found = measure_gain([tally()] * 30)
    # 1 + 0.8 + 0.4 tokens in 0.08 + 0.01 s, against 20 tokens in a second
    assert found.gain.estimate == pytest.approx(2.2 / 0.09 / 20 - 1)
    assert found.gain.low == pytest.approx(found.gain.high)
    assert found.acceptance == pytest.approx((0.8, 0.5))
    assert (found.depth, found.num_requests) == (K, 30)
    assert "+22.2% tokens per second" in found.words


def test_a_draft_that_is_accepted_as_often_but_slow_loses():
    assert measure_gain([tally(draft_s=0.1)] * 30).gain.is_below(0.0)


def test_what_kernels_save_of_the_live_draft_they_will_save_of_the_trial():
    """The live draft takes 10 ms a level where steps are taken one by one, and 8 in kernels."""
    found = measure_gain([tally(usual=0.8)] * 30)
    assert found.gain.estimate == pytest.approx(2.2 / (0.09 - 2 * 0.002) / 20 - 1)


def test_requests_that_differ_make_the_interval_wide():
    even = measure_gain([tally(spread=n % 2) for n in range(40)])
    wide = measure_gain([tally(spread=12 * (n % 2)) for n in range(40)])
    assert 0 < even.gain.high - even.gain.low < wide.gain.high - wide.gain.low
    assert wide.gain.low < 0 < wide.gain.high
    sure = measure_gain([tally(spread=n % 2) for n in range(40)], 0.99)
    assert sure.gain.low < even.gain.low


@pytest.mark.parametrize(
    "tallies",
    [
        [],
        [tally()] * (MIN_REQUESTS - 1),
        [RequestTally()] * 40,
        [RequestTally(weights=[1.0], accepted=[1.0], chains={K: TimedCount(number=1.0)})] * 40,
    ],
)
def test_too_little_gives_no_gain(tallies):
    assert measure_gain(tallies) is None
