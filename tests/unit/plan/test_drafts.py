"""Traced drafts at a smaller K: against drafting the same text again, and worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.plan.acceptance import Drafts, counted
from forerun.theory.speedup import acceptance_length


def drafted_again(right, k):
    """Steps of K over a text of which a greedy draft has some tokens right, in the order of it.

    Every step ends behind a token that was accepted with all before it, plus one.
    """
    drafts, at = Drafts(), 0
    while at + k < len(right):
        accepted = next((n for n in range(k) if not right[at + n]), k)
        drafts.add(k, k, accepted)
        at += accepted + 1
    return drafts, at


@given(st.lists(st.booleans(), min_size=20, max_size=60), st.integers(1, 5))
def test_a_text_drafted_with_a_smaller_k(right, k):
    # Runs of right tokens shorter than the traced K: no step of it is cut by its own K.
    right = [ok and at % 6 > 0 for at, ok in enumerate(right)]
    traced, end = drafted_again(right, 6)
    again, end_again = drafted_again([*right[:end], *[False] * k], k)
    assert end_again == end
    expected, found = again.accepted, traced.limited(k).accepted
    assert found.accepted_per_position == expected.accepted_per_position[: found.max_depth]
    assert found.reached_per_position == expected.reached_per_position[: found.max_depth]
    assert not any(expected.reached_per_position[found.max_depth :])


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3).map(sorted), min_size=1), st.integers(1, 9))
def test_no_token_appears_and_none_is_drafted_beyond_k(steps, k):
    drafts = Drafts()
    for accepted, depth, allowed in steps:
        drafts.add(allowed, depth, accepted)
    limited = drafts.limited(k)
    tokens = sum(n * (accepted + 1) for (_, _, accepted), n in limited.steps.items())
    before = sum(n * (accepted + 1) for (_, _, accepted), n in drafts.steps.items())
    assert before - drafts.steps.total() <= tokens <= before
    assert all(a <= d <= w <= k for w, d, a in limited.steps)


def test_clustered_acceptance_is_worth_more_at_a_small_k_than_first_positions_say():
    drafts = Drafts()
    for accepted in (0, 12):
        for _ in range(50):
            drafts.add(12, 12, accepted)
    found = counted([drafts])
    # 12 accepted take six steps of K = 1 that accept and none that is known to fail, 0 takes one.
    assert acceptance_length(found.at(1).survival) == pytest.approx(1 + 6 / 7)
    assert acceptance_length(found.at(12).survival) == pytest.approx(7.0)


def test_what_a_drafter_leaves_out_is_neither_accepted_nor_paid_for():
    drafts = Drafts()
    for depth, accepted in ((0, 0), (0, 0), (2, 2), (4, 1)):
        for _ in range(20):
            drafts.add(4, depth, accepted)
    found = counted([drafts]).at(4)
    assert found.survival == pytest.approx((0.5, 0.25, 0.0, 0.0))
    assert found.drafted == pytest.approx((0.5, 0.5, 0.25, 0.25))


def test_steps_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="accepted 3 of 2 where 4 were allowed"):
        Drafts().add(4, 2, 3)
