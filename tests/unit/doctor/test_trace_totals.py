"""Figures worked out by hand from a few records."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from tests.records import HEADER, REQUEST, STEP, plain

from forerun.doctor.diagnosis import derive
from forerun.doctor.readers.trace import evidence_of
from forerun.doctor.readers.trace_totals import MAX_NAMED_DAMAGE, ExcessTest, TraceTotals
from forerun.trace.columns import pieces_of
from forerun.trace.files import Damage


def read(items):
    totals = TraceTotals()
    for piece in pieces_of(items):
        totals.add(piece)
    return totals


def kappa_of(items):
    return derive(evidence_of(read(items), "t")).number("cycle_cost")


def drafted(cycle_id: int, accepted: int, depth: int = 3, **changes):
    """A step that drafted a chain and takes 3 + 5 + 1 milliseconds."""
    values = {"draft_s": 0.003, "verify_s": 0.005, "other_s": 0.001, "t_s": float(cycle_id)}
    return replace(
        STEP,
        cycle_id=cycle_id,
        k_budget=depth,
        num_drafted=depth,
        depth_drafted=depth,
        num_accepted=accepted,
        num_emitted=accepted + 1,
        expected_accepted=accepted + 0.25,
        **(values | changes),
    )


def undrafted(cycle_id: int, **changes):
    """A plain step that takes 6 milliseconds."""
    values = {"verify_s": 0.005, "other_s": 0.001, "t_s": float(cycle_id)}
    return plain(cycle_id=cycle_id, **(values | changes))


def prefill(cycle_id: int, **changes):
    return undrafted(cycle_id, num_prefill_rows=12, verify_s=0.9, **changes)


ONE = [
    HEADER,
    prefill(0),
    drafted(1, 3),
    drafted(2, 0),
    drafted(3, 1),
    drafted(4, 2, depth=2),
    *(undrafted(cycle) for cycle in range(5, 15)),
    REQUEST,
]
"""One request: four steps that drafted 3, 3, 3 and 2 tokens, ten plain ones."""


def test_counts_of_one_request():
    found = read(ONE)
    assert found.headers == [HEADER]
    assert (len(found.requests), found.num_damaged) == (1, 0)
    assert (found.num_steps, found.num_tokens) == (15, 1 + 4 + 1 + 2 + 3 + 10)
    assert found.acceptance.num_steps == 4
    assert found.acceptance.acceptance_length == (6 + 4) / 4
    assert found.expected_accepted == 7.0


def test_positions_have_their_denominators():
    counts = read(ONE).acceptance
    assert counts.accepted_per_position == (3, 2, 1)
    assert counts.drafted_per_position == (4, 4, 3)
    # Position 3 was reached by one step that drafted it: the other had drafted only two.
    assert counts.survival == pytest.approx((3 / 4, 2 / 4, 2 / 4))


def test_cost_compares_decode_steps_only():
    assert kappa_of(ONE) == pytest.approx(9 / 6)


def test_too_few_plain_steps_give_no_cost():
    assert kappa_of([drafted(0, 1), *(undrafted(cycle) for cycle in range(1, 8))]) is None


def test_steps_in_which_a_drafter_found_nothing_are_not_plain():
    slow = [undrafted(cycle, k_budget=4, verify_s=0.5) for cycle in range(20, 40)]
    assert kappa_of([*ONE, *slow]) == pytest.approx(9 / 6)
    assert read([*ONE, *slow]).cycles.total.num_cycles == 35


def test_plain_steps_are_compared_with_cycles_of_their_size():
    """Two requests together take longer, drafting or not."""
    pairs = [
        record
        for cycle in range(20, 30)
        for name in ("a", "b")
        for record in [undrafted(cycle, request_id=name, verify_s=0.011)]
    ]
    together = [drafted(40, 1, request_id=n, verify_s=0.02) for n in ("a", "b")]
    crowd = [drafted(50, 1, request_id=name) for name in "abc"]
    found = kappa_of([*ONE, *pairs, *together, *crowd])
    assert found == pytest.approx((4 * 9 + 24) / (4 * 6 + 12))


def test_who_waits_for_others_drafts_is_no_plain_step():
    mixed = [
        record
        for cycle in range(20)
        for record in (drafted(cycle, 1, request_id="a"), undrafted(cycle, request_id="b"))
    ]
    assert read(mixed).cycles.plain_step_s == {}


def test_time_of_a_cycle_counts_once():
    shared = [drafted(1, 1, request_id=name) for name in "abc"]
    cycles = read([*shared, prefill(2)]).cycles
    times = cycles.total
    assert (times.num_cycles, cycles.by_size("prefill")[1].num_cycles) == (2, 1)
    assert times.draft_s == pytest.approx(0.003)
    assert times.verify_s == pytest.approx(0.905)
    assert times.other_s == pytest.approx(0.002)
    assert times.total_s == pytest.approx(0.91)


def test_cycles_of_several_engines_are_told_apart():
    """Each engine counts its cycles from 0."""
    first, second = drafted(0, 1, request_id="x/0"), drafted(0, 1, request_id="y/0", t_s=77.0)
    assert read([first, second]).cycles.total.num_cycles == 2


def test_trees_count_nodes_and_depth_apart():
    counts = read([replace(drafted(1, 2), num_drafted=7)]).acceptance
    assert (counts.max_depth, counts.num_drafted, counts.num_accepted) == (3, 7, 2)


def test_damage_is_counted_and_the_first_places_named():
    bad = [Damage(where=f"line {i}", what="no JSON") for i in range(MAX_NAMED_DAMAGE + 5)]
    found = read([*bad, *ONE])
    assert found.num_damaged == MAX_NAMED_DAMAGE + 5
    assert found.damage == [*map(str, bad[:MAX_NAMED_DAMAGE])]
    assert found.num_steps == 15


@pytest.mark.parametrize("items", [[], [HEADER], [REQUEST], [undrafted(0)]])
def test_what_holds_nothing_drafted_has_no_figures(items):
    found = derive(evidence_of(read(items), "t"))
    assert not {"acceptance_length", "cycle_cost", "k"} & found.facts.keys()


def excess_of(accepted: list[int], expected: float, depth: int = 4) -> float:
    found = ExcessTest()
    columns = {
        "num_accepted": np.array(accepted),
        "expected_accepted": np.full(len(accepted), expected),
        "depth_drafted": np.full(len(accepted), depth),
    }
    found.add(columns)
    return found.values[0]


def test_an_excess_is_shown_and_luck_is_not():
    assert excess_of([4] * 30, 3.6) < 200.0, "nothing rejected in 30 steps happens one in 23 times"
    assert excess_of([2] * 1000, 2.0) <= 1.0
    assert excess_of([4] * 60, 2.0) > 1e6


def test_an_e_value_has_a_mean_of_at_most_one():
    """Two outcomes, all or nothing, are the hardest case: there the bound is an equation."""
    mean = 0.3 * excess_of([4], 1.2) + 0.7 * excess_of([0], 1.2)
    assert mean == pytest.approx(1.0)
