"""Figures of the live page: averages over the latest steps, in bounded memory."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.records import STEP

from forerun.server.live_figures import HISTORY_S, WINDOW_S, LiveFigures
from forerun.theory.figures import PlainComparison, Seconds


def drafting(cycle_id: int, *, t_s: float = 10.0, seconds: float = 0.02, request_id: str = "r"):
    return replace(
        STEP,
        cycle_id=cycle_id,
        t_s=t_s,
        request_id=request_id,
        draft_s=seconds / 2,
        verify_s=seconds / 2,
        other_s=0.0,
    )


def plain(cycle_id: int, *, t_s: float = 10.0, seconds: float = 0.01):
    return replace(
        drafting(cycle_id, t_s=t_s),
        method="plain",
        k_budget=0,
        num_drafted=0,
        depth_drafted=0,
        num_accepted=0,
        num_emitted=1,
        draft_s=0.0,
        verify_s=seconds,
    )


def test_no_steps_give_no_figures():
    figures = LiveFigures()
    assert figures.compare() == PlainComparison(speedup=None, seconds=Seconds())
    assert figures.tokens_per_s(10.0) == 0.0
    assert figures.counts.acceptance_length is None


def test_speedup_is_the_time_of_plain_steps_for_the_same_tokens():
    figures = LiveFigures()
    for second in range(20):
        figures.add([plain(1000 * second + n, t_s=second) for n in range(6)])
        figures.add([drafting(1000 * second + 10 + n, t_s=second) for n in range(94)])
    # a plain step takes 10 ms for a token, a drafting one 20 ms for three
    decode_s = 6 * 0.01 + 94 * 0.02
    as_plain_s = (6 + 94 * 3) * 0.01
    found = figures.compare().speedup
    assert found is not None
    assert found.estimate == pytest.approx(as_plain_s / decode_s, rel=0.005)
    assert found.low <= found.estimate <= found.high


def test_the_first_plain_step_after_a_draft_is_not_measured():
    figures = LiveFigures()
    for n in range(0, 100, 2):
        figures.add([drafting(n), plain(n + 1, seconds=5.0)])
    assert not any(group.plain for group in figures.window)
    assert figures.compare().speedup is None


def test_a_step_in_which_a_drafter_found_nothing_is_not_plain():
    figures = LiveFigures()
    for second in range(5):
        steps = [plain(1000 * second + n, t_s=second) for n in range(20)]
        figures.add([replace(step, k_budget=4) for step in steps])
    assert not any(group.plain for group in figures.window)
    assert figures.compare().speedup is None
    assert figures.compare().seconds.num_cycles == 100


def test_steps_that_read_prompts_are_not_timed():
    figures = LiveFigures()
    figures.add([replace(drafting(1), num_prefill_rows=30)])
    assert figures.compare().seconds == Seconds()
    assert figures.counts.num_steps == 1


def test_a_cycle_of_several_requests_is_timed_once():
    figures = LiveFigures()
    figures.add([drafting(1), drafting(1, request_id="s")])
    times = figures.compare().seconds
    assert (times.num_cycles, times.num_steps, times.num_tokens) == (1, 2, 6)
    assert times.draft_s + times.verify_s == pytest.approx(0.02)


def test_the_times_per_token_have_the_speedup_as_their_ratio():
    figures = LiveFigures()
    for second in range(5):
        figures.add([plain(1000 * second + n, t_s=second, seconds=0.01) for n in range(6)])
        figures.add([drafting(1000 * second + 10 + n, t_s=second) for n in range(second + 1)])
        pair = drafting(1000 * second + 90, t_s=second, seconds=9.0)  # no plain step has this batch
        figures.add([pair, replace(pair, request_id="s")])
    found = figures.compare()
    assert found.speedup is not None
    token_s = found.seconds.total_s / found.seconds.num_tokens
    assert found.plain_token_s / token_s == pytest.approx(found.speedup.estimate)
    assert found.share_compared == pytest.approx((30 + 45) / (30 + 45 + 30))


def test_acceptance_by_position():
    figures = LiveFigures()
    figures.add([drafting(1), replace(drafting(2), num_accepted=0, num_emitted=1)])
    assert figures.counts.drafted_per_position == (2, 2, 2, 2)
    assert figures.counts.accepted_per_position == (1, 1, 0, 0)
    assert figures.counts.acceptance_length == 2.0


def test_memory_is_bounded_and_old_seconds_are_left_out():
    figures = LiveFigures()
    for second in range(3 * HISTORY_S):
        figures.add([drafting(second, t_s=second + 0.5)])
    assert len(figures.groups) == HISTORY_S
    assert figures.counts.num_steps == WINDOW_S


def test_rate_counts_idle_seconds():
    figures = LiveFigures()
    figures.add([drafting(n, t_s=20.0) for n in range(10)])
    assert figures.tokens_per_s(21.0) == pytest.approx(30.0)
    assert figures.tokens_per_s(25.0) == pytest.approx(6.0)
    assert figures.tokens_per_s(40.0) == 0.0


def test_points_name_the_drafter_of_every_step():
    figures = LiveFigures()
    figures.add([drafting(1), plain(2), replace(drafting(3), method="suffix")])
    point = figures.points(12.0)[-1]
    assert point["methods"] == {"draft_model": 1, "plain": 1, "suffix": 1}
    assert point["age_s"] == 2.0
    assert point["num_speculative_tokens"] == pytest.approx(8 / 3)


def test_the_baseline_is_of_the_same_seconds_as_the_steps():
    figures = LiveFigures()
    for second in range(3 * HISTORY_S):
        slow = 9.0 if second < HISTORY_S else 1.0  # another program slows everything at first
        figures.add([plain(1000 * second + n, t_s=second, seconds=0.01 * slow) for n in range(6)])
        figures.add([drafting(1000 * second + 9, t_s=second, seconds=0.02 * slow)])
    found = figures.compare().speedup
    assert found is not None
    assert found.estimate == pytest.approx((6 + 3) * 0.01 / (6 * 0.01 + 0.02), rel=1e-6)


def test_a_baseline_outlives_the_seconds_that_were_kept():
    figures = LiveFigures()
    for second in range(5):
        figures.add([plain(1000 * second + n, t_s=second) for n in range(6)])
    for second in range(5, 10 + HISTORY_S):
        figures.add([drafting(1000 * second, t_s=second)])
    found = figures.compare().speedup
    assert found is not None
    assert found.estimate == pytest.approx(1.5)


def test_batch_sizes_have_baselines_of_their_own():
    figures = LiveFigures()
    for second in range(10):
        alone = [plain(1000 * second + n, t_s=second, seconds=0.01) for n in range(3)]
        pairs = [plain(1000 * second + n, t_s=second, seconds=0.012) for n in range(3, 6)]
        figures.add(alone)
        figures.add([r for p in pairs for r in (p, replace(p, request_id="s"))])
    found = figures.compare().speedup
    assert found is not None
    assert found.estimate == pytest.approx(1.0, rel=0.01)
