from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.records import HEADER, REQUEST, STEP, plain, steps

from forerun.errors import InvalidTrace
from forerun.plan.acceptance import drafts_in

SUFFIX = replace(HEADER, draft="suffix", draft_hash=None)


def test_requests_are_kept_apart():
    other = [replace(record, request_id="s") for record in steps(3, num_accepted=0)]
    found = drafts_in([HEADER, *steps(5), *other, plain()], "t")
    assert {name: d.steps.total() for name, d in found.drafts["draft"].requests.items()} == {
        "r": 5,
        "s": 3,
    }


def test_drafters_are_told_apart_by_method_and_hash():
    copied = replace(STEP, method="suffix", request_id="s", drafter_hash=None)
    drafted = replace(STEP, drafter_hash="d0")
    other = replace(STEP, drafter_hash="d1", request_id="o")
    second = replace(HEADER, draft="second", draft_hash="d1")
    found = drafts_in([HEADER, SUFFIX, second, copied, drafted, other], "t")
    assert {name: set(draft.requests) for name, draft in found.drafts.items()} == {
        "draft": {"r"},
        "suffix": {"s"},
        "second": {"o"},
    }


def test_two_self_drafts_are_told_apart_by_their_names():
    headers = [replace(SUFFIX, draft=name) for name in ("self:int4", "self:2")]
    drafted = [replace(STEP, method=h.draft, drafter_hash=None) for h in headers]
    found = drafts_in([*headers, *drafted, drafted[0]], "t")
    counts = {name: draft.requests["r"].steps.total() for name, draft in found.drafts.items()}
    assert counts == {"self:int4": 2, "self:2": 1}
    earlier = replace(drafted[0], method="self")  # as an earlier release wrote it
    assert (
        drafts_in([headers[0], earlier], "t").drafts["self:int4"].requests["r"].steps.total() == 1
    )


def test_a_step_of_an_unknown_drafter_is_refused():
    second = replace(HEADER, draft="second", draft_hash="d1")
    with pytest.raises(InvalidTrace, match="which of its 2 drafters request r used at step 2"):
        drafts_in([HEADER, second, STEP], "t")


def test_drafting_beside_a_prompt_says_nothing_of_its_cost():
    beside = replace(STEP, num_prefill_rows=9, draft_s=100.0)
    found = drafts_in([HEADER, beside, STEP], "t").drafts["draft"]
    assert found.draft_token_s == pytest.approx(STEP.draft_s / STEP.depth_drafted)
    assert drafts_in([HEADER, beside], "t").drafts["draft"].draft_token_s is None


def test_the_rest_of_a_cycle_is_that_of_cycles_that_drafted():
    looked = replace(STEP, num_drafted=0, depth_drafted=0, num_accepted=0, other_s=100.0)
    beside = replace(STEP, num_prefill_rows=9, other_s=100.0)
    longer = replace(STEP, other_s=3 * STEP.other_s)
    found = drafts_in([HEADER, beside, STEP, looked, longer], "t").drafts["draft"]
    assert found.overhead_s == pytest.approx(2 * STEP.other_s)
    assert drafts_in([HEADER, beside], "t").drafts["draft"].overhead_s is None


def test_greedy_and_sampled_requests_are_told_apart():
    greedy = replace(REQUEST, request_id="g", parameters={"temperature": 0.0})
    records = [HEADER, STEP, replace(STEP, request_id="g"), replace(STEP, request_id="open")]
    found = drafts_in([*records, REQUEST, greedy], "t")
    assert len(found.counts("draft", 0.0)) == 2
    assert len(found.counts("draft", 0.7)) == 2
    sampled_only = drafts_in([HEADER, STEP, REQUEST], "t")
    with pytest.raises(InvalidTrace, match="no step of draft at temperature 0, but 1 requests"):
        sampled_only.counts("draft", 0.0)


def test_a_drafter_that_pauses_has_chosen_its_plain_steps_itself():
    copied = replace(STEP, method="suffix", drafter_hash=None)
    looked = replace(copied, num_drafted=0, depth_drafted=0, num_accepted=0)
    ended = replace(copied, k_budget=2, num_drafted=2, depth_drafted=2)
    found = drafts_in([SUFFIX, copied, looked, plain(), ended, plain(request_id="s")], "t")
    assert found.drafts["suffix"].requests["r"].steps == {
        (4, 4, 2): 1,
        (4, 0, 0): 2,
        (2, 2, 2): 1,
    }
    model = drafts_in([HEADER, STEP, plain()], "t").drafts["draft"]
    assert model.requests["r"].steps == {(4, 4, 2): 1}


@pytest.mark.parametrize("items", [[], [HEADER], [HEADER, plain(), REQUEST]])
def test_a_trace_that_never_drafted_is_refused(items):
    with pytest.raises(InvalidTrace, match="drafted in none of them"):
        drafts_in(items, "t")
