"""Figures worked out by hand from a few records."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace
from tests.records import HEADER, REQUEST, STEP, plain

from forerun.theory.intervals import wilson_interval
from forerun.trace.files import Damage
from forerun.trace.summary import MAX_DAMAGE, summarise


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
    found = summarise(ONE)
    overall = found.overall
    assert found.headers == [HEADER]
    assert (overall.num_requests, found.num_unfinished, found.num_damaged) == (1, 0, 0)
    assert (overall.num_steps, overall.num_tokens) == (15, 1 + 4 + 1 + 2 + 3 + 10)
    assert overall.acceptance.num_steps == 4
    assert overall.acceptance.acceptance_length == (6 + 4) / 4
    assert overall.wasted_share == 1 - 6 / 11
    assert overall.expected_accepted == 7.0
    assert found.median_ttft_s == REQUEST.ttft_s


def test_positions_have_their_denominators_and_intervals():
    positions = summarise(ONE).overall.positions
    assert [(p.num_accepted, p.num_drafted) for p in positions] == [(3, 4), (2, 4), (1, 3)]
    assert [p.rate for p in positions] == [
        wilson_interval(3, 4),
        wilson_interval(2, 4),
        wilson_interval(1, 3),
    ]
    # Position 3 was reached by one step that drafted it: the other had drafted only two.
    assert [p.survival for p in positions] == pytest.approx([3 / 4, 2 / 4, 2 / 4])


def test_cost_compares_decode_steps_only():
    cost = summarise(ONE).cycle_cost
    assert cost is not None
    assert cost.estimate == pytest.approx(9 / 6)
    assert (cost.num_steps, cost.num_uncompared) == (4, 0)


def test_too_few_plain_steps_give_no_cost():
    found = summarise([drafted(0, 1), *(undrafted(cycle) for cycle in range(1, 8))])
    assert found.cycle_cost is None
    assert found.to_dict()["overall"]["cycle_cost"] is None


def test_steps_in_which_a_drafter_found_nothing_are_not_plain():
    slow = [undrafted(cycle, k_budget=4, verify_s=0.5) for cycle in range(20, 40)]
    found = summarise([*ONE, *slow])
    cost = found.cycle_cost
    assert cost is not None
    assert cost.estimate == pytest.approx(9 / 6)
    assert found.times.num_cycles == 35


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
    cost = summarise([*ONE, *pairs, *together, *crowd]).cycle_cost
    assert cost is not None
    assert cost.estimate == pytest.approx((4 * 9 + 2 * 24) / (4 * 6 + 2 * 12))
    assert (cost.num_steps, cost.num_uncompared) == (6, 3)


def test_who_waits_for_others_drafts_is_no_plain_step():
    mixed = [
        record
        for cycle in range(20)
        for record in (drafted(cycle, 1, request_id="a"), undrafted(cycle, request_id="b"))
    ]
    assert summarise(mixed).plain_step_s == {}


def test_time_of_a_cycle_counts_once():
    shared = [drafted(1, 1, request_id=name) for name in "abc"]
    found = summarise([*shared, prefill(2)])
    times = found.times
    assert (times.num_cycles, found.num_prefill_cycles) == (2, 1)
    assert times.draft_s == pytest.approx(0.003)
    assert times.verify_s == pytest.approx(0.905)
    assert times.other_s == pytest.approx(0.002)
    assert times.total_s == pytest.approx(0.91)


def test_cycles_of_several_engines_are_told_apart():
    """Each engine counts its cycles from 0."""
    first, second = drafted(0, 1, request_id="x/0"), drafted(0, 1, request_id="y/0", t_s=77.0)
    assert summarise([first, second]).times.num_cycles == 2


def test_tags_gather_their_requests():
    records = []
    for index, tags in enumerate([("python",), ("python", "long"), ("prose",), ()]):
        name = f"r{index}"
        records += [
            drafted(100 * index + 1, index % 4, request_id=name),
            replace(REQUEST, request_id=name, tags=tags),
        ]
    found = summarise(records)
    assert found.overall.num_requests == 4
    tags = {tag: group.acceptance.num_accepted for tag, group in found.tags.items()}
    assert tags == {"python": 0 + 1, "long": 1, "prose": 2}
    assert found.tags["python"].num_requests == 2


def test_requests_may_be_listed_after_all_steps():
    steps_first = sorted(ONE, key=lambda record: record is REQUEST)
    assert summarise(steps_first).to_dict() == summarise(ONE).to_dict()


def test_requests_without_an_end_are_unfinished():
    found = summarise([*ONE[:-1], drafted(90, 1, request_id="cut")])
    assert found.num_unfinished == 2
    assert found.overall.num_steps == 16


def test_trees_count_nodes_and_depth_apart():
    tree = replace(drafted(1, 2), num_drafted=7)
    overall = summarise([tree]).overall
    assert len(overall.positions) == 3
    assert overall.wasted_share == 1 - 2 / 7


def test_damage_is_counted_and_the_first_places_named():
    bad = [Damage(where=f"line {i}", what="no JSON") for i in range(MAX_DAMAGE + 5)]
    found = summarise([*bad, *ONE])
    assert found.num_damaged == MAX_DAMAGE + 5
    assert found.damage == bad[:MAX_DAMAGE]
    assert found.overall.num_steps == 15


@pytest.mark.parametrize("items", [[], [HEADER], [REQUEST], [undrafted(0)]])
def test_what_holds_nothing_drafted_has_no_figures(items):
    found = summarise(items)
    assert found.overall.acceptance.acceptance_length is None
    assert found.overall.wasted_share is None
    assert found.overall.positions == ()
    assert found.cycle_cost is None
    json.dumps(found.to_dict())


def test_json_has_everything(tmp_path):
    content = json.loads(json.dumps(summarise(ONE).to_dict()))
    assert content["overall"]["acceptance_length"] == 2.5
    assert content["overall"]["cycle_cost"]["estimate"] == pytest.approx(1.5)
    assert content["overall"]["positions"][2]["num_drafted"] == 3
    assert content["times"]["num_cycles"] == 15
    assert content["tags"].keys() == {"python", "größe"}
