from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.records import STEP

from forerun.theory.acceptance import AcceptanceCounts


def counted(*steps: tuple[int, int]) -> AcceptanceCounts:
    counts = AcceptanceCounts()
    for depth_drafted, num_accepted in steps:
        counts.add(depth_drafted, num_accepted)
    return counts


MIXED = counted((3, 3), (3, 1), (3, 0), (1, 1), (0, 0))


def test_totals():
    assert MIXED.num_steps == 5
    assert MIXED.num_drafted == 10
    assert MIXED.num_accepted == 5
    assert MIXED.num_emitted == 10
    assert MIXED.draft_acceptance_rate == 0.5
    assert MIXED.acceptance_length == 2.0


def test_plain_steps_can_be_left_out():
    assert MIXED.drafting == counted((3, 3), (3, 1), (3, 0), (1, 1))


def test_chains_can_be_cut():
    assert MIXED.with_chains_of(2) == counted((2, 2), (2, 1), (2, 0), (1, 1), (0, 0))
    assert MIXED.with_chains_of(0) == counted(*[(0, 0)] * 5)


def test_a_position_that_was_not_drafted_is_not_a_rejection():
    assert MIXED.drafted_per_position == (4, 3, 3)
    assert MIXED.accepted_per_position == (3, 1, 1)
    assert MIXED.acceptance_rate_per_position == pytest.approx((3 / 4, 1 / 3, 1 / 3))


def test_conditional_acceptance_counts_only_steps_that_got_there():
    # Position 2 was drafted three times but reached twice: (3, 0) fell before it, (1, 1) ended.
    assert MIXED.reached_per_position == (4, 2, 1)
    assert MIXED.conditional_acceptance == pytest.approx((3 / 4, 1 / 2, 1.0))
    assert MIXED.survival == pytest.approx((3 / 4, 3 / 8, 3 / 8))


def test_at_fixed_depth_survival_equals_the_rate_per_position():
    counts = counted((4, 4), (4, 2), (4, 2), (4, 0), (4, 1))
    assert counts.survival == pytest.approx(counts.acceptance_rate_per_position)
    assert counts.acceptance_length == pytest.approx(1 + sum(counts.survival))


def test_a_position_never_reached_has_survival_zero():
    counts = counted((3, 0), (3, 0))
    assert counts.conditional_acceptance == (0.0, 0.0, 0.0)
    assert counts.survival == (0.0, 0.0, 0.0)


def test_a_tree_has_more_nodes_than_depth():
    counts = AcceptanceCounts()
    counts.add(3, 2, num_drafted=12)
    assert counts.draft_acceptance_rate == pytest.approx(2 / 12)
    assert counts.drafted_per_position == (1, 1, 1)
    assert counts.acceptance_length == 3.0


def test_nothing_counted_claims_nothing():
    empty = AcceptanceCounts()
    assert empty.acceptance_length is None
    assert empty.draft_acceptance_rate is None
    assert empty.acceptance_rate_per_position == ()


def test_plain_steps_emit_one_token_each():
    plain = counted((0, 0), (0, 0))
    assert plain.acceptance_length == 1.0
    assert plain.draft_acceptance_rate is None


def test_merging_is_counting_together():
    left, right = counted((3, 3), (3, 1)), counted((3, 0), (1, 1), (0, 0))
    assert left + right == MIXED
    assert left.num_steps == 2, "the parts are left alone"
    assert MIXED + AcceptanceCounts() == MIXED


def test_counts_from_a_trace():
    records = [
        replace(STEP, num_drafted=5, depth_drafted=3, num_accepted=2),
        replace(STEP, num_drafted=3, depth_drafted=3, num_accepted=0),
    ]
    counts = AcceptanceCounts.from_records(records)
    assert (counts.num_steps, counts.num_drafted, counts.num_accepted) == (2, 8, 2)
    assert counts.accepted_per_position == (1, 1, 0)


@pytest.mark.parametrize(
    ("depth_drafted", "num_accepted", "num_drafted"), [(2, 3, None), (2, -1, None), (3, 1, 2)]
)
def test_impossible_steps_are_refused(depth_drafted, num_accepted, num_drafted):
    with pytest.raises(ValueError, match=f"{num_accepted} accepted, depth {depth_drafted}"):
        AcceptanceCounts().add(depth_drafted, num_accepted, num_drafted=num_drafted)


@pytest.mark.parametrize(
    "outcomes",
    [[], [(3, 3)], [(3, 0), (3, 3), (1, 1), (2, 0)], [(1, 0), (4, 4), (4, 1), (4, 1), (2, 2)]],
)
def test_totals_by_position_are_kept(outcomes):
    steps = counted(*outcomes)
    found = AcceptanceCounts.from_positions(
        steps.drafted_per_position, [*steps.accepted_per_position, 0]
    )
    for name in ("num_steps", "num_drafted", "num_accepted", "drafted_per_position"):
        assert getattr(found, name) == getattr(steps, name)
    assert found.accepted_per_position == steps.accepted_per_position
    assert all(accepted <= depth for depth, accepted in found.steps)
