"""A drafter may do anything: the text is that of plain decoding and one line says why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests import tiny
from tests.faulty import (
    DAMAGES,
    Damaging,
    Faulty,
    RaisesAlways,
    RaisesInForget,
    RaisesInObserve,
    RaisesInObserveOfOneRow,
    RaisesOnce,
    RaisesOnceInObserve,
    RaisesOnOneRow,
    WrongNumber,
    draft_probs_that_are_logits,
    id_past_the_vocabulary,
    impossible_draw,
    nan_draft_probs,
    no_draft_probs,
    too_many_nodes,
)
from tests.tabular import TabularModel

from forerun.drafters.base import Drafter
from forerun.drafters.draft_model import DraftModel
from forerun.sampling.config import SamplingParams
from forerun.sampling.proposal import Choice, Proposal

PROMPTS = [[1, 2, 3], [4, 4], [5, 6, 7, 1], [2, 2]]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
SEEDED = SamplingParams(seed=5, max_tokens=14, ignore_eos=True)
# What each sequence of `PROMPTS` is called when it is the first call of an engine.
KEYS = [f"request-{index}" for index in range(len(PROMPTS))]

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture
def draft(target: TabularModel) -> DraftModel:
    return tiny.drafting(tiny.cousin(target, 5), 8)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged at warning or above."""
    caplog.set_level(logging.INFO, "forerun")

    def messages() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]

    return messages


def num_drafted(target: TabularModel, drafter: Drafter, params: SamplingParams) -> list[int]:
    """Tokens drafted for every prompt, after the texts have been checked."""
    plain = tiny.engine_over(target).generate(PROMPTS, params)
    found = tiny.engine_over(target, drafter).generate(PROMPTS, params)
    assert [o.token_ids for o in found] == [o.token_ids for o in plain]
    assert [o.text for o in found] == [o.text for o in plain]
    assert target.store.num_free == 4
    return [output.completions[0].acceptance.num_drafted for output in found]


@pytest.fixture
def sound(target: TabularModel, params: SamplingParams) -> list[int]:
    """Tokens a drafter without faults drafts."""
    return num_drafted(target, tiny.drafting(tiny.cousin(target, 5), 8), params)


both = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])


@both
def test_a_sound_drafter_says_nothing(target, draft, warnings, params):
    assert min(num_drafted(target, Faulty(draft), params)) > 5
    assert warnings() == []
    assert draft.model.store.num_free == 4


@both
@pytest.mark.parametrize("kind", [RaisesAlways, WrongNumber])
def test_a_drafter_that_always_fails_is_no_drafter(target, draft, warnings, params, kind):
    drafter = kind(draft)
    assert num_drafted(target, drafter, params) == [0, 0, 0, 0]
    assert len(warnings()) == 4
    for key in KEYS:
        assert sum(f"{key} decodes plainly" in line for line in warnings()) == 1
    assert drafter.num_proposals == 5, "one batch, then each row once"
    assert draft.model.store.num_free == 4


@both
def test_a_failed_batch_is_retried_row_by_row(target, draft, warnings, params, sound):
    drafter = RaisesOnce(draft)
    assert num_drafted(target, drafter, params) == sound
    assert warnings() == []
    assert draft.model.store.num_free == 4


@both
def test_a_row_that_fails_leaves_the_others_their_drafts(target, draft, warnings, params, sound):
    found = num_drafted(target, RaisesOnOneRow(draft), params)
    assert found == [*sound[:2], 0, sound[3]]
    (line,) = warnings()
    assert KEYS[2] in line
    assert "not that one" in line
    assert draft.model.store.num_free == 4


@pytest.mark.parametrize("params", [SEEDED], ids=["seeded"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_proposal_costs_its_request_the_drafts(
    target, draft, warnings, params, sound, damage
):
    found = num_drafted(target, Damaging(draft, damage), params)
    assert found == [*sound[:2], 0, sound[3]]
    (line,) = warnings()
    assert KEYS[2] in line
    assert draft.model.store.num_free == 4


def test_reasons_name_what_is_wrong(target, draft, warnings):
    num_drafted(target, Damaging(draft, id_past_the_vocabulary), GREEDY)
    assert "outside 0..7" in warnings()[0]
    num_drafted(target, Damaging(draft, too_many_nodes), GREEDY)
    assert "7 nodes, but K is 3" in warnings()[1]


@pytest.mark.parametrize("verification", ["block", "token"])
def test_a_proposal_the_asked_verifier_is_not_exact_for_is_refused(
    target, draft, warnings, verification
):
    """Found out before the pass: in the step it would fail every request."""

    def coupled(proposal: Proposal) -> Proposal:
        return replace(proposal, choice=Choice.COUPLED)

    params = SamplingParams(seed=5, max_tokens=20, verification=verification)
    output = tiny.engine_over(target, Damaging(draft, coupled)).generate(PROMPTS, params)
    assert output[2].completions[0].acceptance.num_drafted == 0
    assert output[1].completions[0].acceptance.num_drafted > 0
    (line,) = warnings()
    assert verification in line


@pytest.mark.parametrize(
    "damage", [nan_draft_probs, no_draft_probs, draft_probs_that_are_logits, impossible_draw]
)
def test_damaged_proposals_leave_block_verification_plain(target, draft, warnings, damage):
    """Without drafts the block rule draws each token with the noise of a plain step."""
    params = SamplingParams(seed=5, max_tokens=20, verification="block", ignore_eos=True)
    plain = tiny.engine_over(target).generate(PROMPTS, params)
    found = tiny.engine_over(target, Damaging(draft, damage)).generate(PROMPTS, params)
    assert found[2].token_ids == plain[2].token_ids
    assert found[2].completions[0].acceptance.num_drafted == 0
    assert len(warnings()) == 1


@both
def test_an_observer_that_always_fails_ends_drafting(target, draft, warnings, params):
    drafter = RaisesInObserve(draft)
    assert max(num_drafted(target, drafter, params)) <= 6
    assert len(warnings()) == 4
    for key in KEYS:
        assert sum(f"{key} decodes plainly" in line for line in warnings()) == 1
    assert draft.model.store.num_free == 4


@both
def test_an_observer_that_fails_once_loses_only_its_state(target, draft, warnings, params, sound):
    assert num_drafted(target, RaisesOnceInObserve(draft), params) == sound
    assert warnings() == []
    assert draft.model.store.num_free == 4


@both
def test_an_observer_that_fails_on_one_row_spares_the_others(
    target, draft, warnings, params, sound
):
    found = num_drafted(target, RaisesInObserveOfOneRow(draft), params)
    assert found[:2] == sound[:2]
    assert found[3] == sound[3]
    assert found[2] < sound[2]
    (line,) = warnings()
    assert KEYS[2] in line
    assert draft.model.store.num_free == 4


@both
def test_a_drafter_that_cannot_forget_loses_no_text(target, draft, params):
    num_drafted(target, RaisesInForget(draft), params)
    assert draft.model.store.num_free == 4


@both
def test_a_draft_with_too_few_slots_drafts_for_those_it_has(target, warnings, params):
    """The rows that fit keep their drafts, and their state, through the retry of the batch."""
    small = tiny.tabular(5, num_slots=2)
    drafter = Faulty(tiny.drafting(small, 8))
    found = num_drafted(target, drafter, params)
    assert [drafted > 10 for drafted in found] == [True, True, False, False]
    assert len(warnings()) == 2
    assert all("slots" in line for line in warnings())
    assert small.store.num_free == 2
