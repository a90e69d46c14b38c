"""What is believed of drafts: of those that were made, and of those a probe would have made."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.records import STEP

from forerun.control.base import RequestState
from forerun.control.beliefs import Beliefs, DraftVariant
from forerun.control.config import BeliefConfig
from forerun.theory.drift import Memory
from forerun.theory.record import StepRecord

STATE = RequestState(request_id="r", num_committed=100, max_new=500, temperature=0.0)
WAY = DraftVariant("d", stops=False)


def outcome(accepted: int, **changes) -> StepRecord:
    return replace(
        STEP, request_id="r", k_budget=1, depth_drafted=1, num_accepted=accepted, **changes
    )


def first_position(beliefs: Beliefs) -> float:
    return beliefs.curve(STATE, WAY, 4).survival[0]


def test_hindsight_counts_as_drafts_of_one_token():
    looked_back, drafted = Beliefs(BeliefConfig()), Beliefs(BeliefConfig())
    for beliefs in (looked_back, drafted):
        first_position(beliefs)  # the request is known from now on
    came = (1, 0, 1, 1, 1, 0)
    looked_back.observe(outcome(1, hindsight=came), WAY)
    for accepted in (*came, 1):
        drafted.observe(outcome(accepted), WAY)
    assert looked_back.curve(STATE, WAY, 4) == drafted.curve(STATE, WAY, 4)


def test_one_look_back_at_a_good_draft_outweighs_many_rejections():
    beliefs = Beliefs(BeliefConfig())
    first_position(beliefs)
    for _ in range(100):
        beliefs.observe(outcome(0), WAY)
    assert first_position(beliefs) < 0.1
    beliefs.observe(outcome(0, hindsight=(1,) * 12), WAY)
    assert first_position(beliefs) > 0.6


@pytest.mark.parametrize("strength", [4.0, 30.0])
@pytest.mark.parametrize("num_own", [0, 1, 30, 100])
def test_a_request_is_believed_to_be_so_much_like_the_others_of_its_kind(strength, num_own):
    """As if it had drafted `strength` tokens that fared as theirs did."""
    lasting = Memory(slow=1 - 1e-12, fast=0.5, surprise=1e9)
    beliefs = Beliefs(BeliefConfig(request=lasting, strength=strength))
    others, fresh = (replace(STATE, request_id=name) for name in ("other", "fresh"))
    for state in (STATE, others):
        beliefs.curve(state, WAY, 1)
    for _ in range(50):
        beliefs.observe(replace(outcome(0), request_id="other"), WAY)
    for _ in range(num_own):
        beliefs.observe(outcome(1), WAY)
    (pool,) = beliefs.curve(fresh, WAY, 1).survival
    expected = (num_own + strength * pool) / (num_own + strength)
    assert first_position(beliefs) == pytest.approx(expected)


def test_what_is_new_of_a_request_is_what_came_since_it_was_first_asked_about():
    beliefs = Beliefs(BeliefConfig())
    tagged = replace(STATE, tags=("code",))
    assert beliefs.news(tagged)[1:] == (0, 100)
    beliefs.observe(outcome(1, context_tokens=100, num_emitted=2), WAY)
    later = beliefs.news(replace(tagged, num_committed=130))
    assert later.tokens == 30
    assert later.missed == 28
    other = beliefs.news(replace(STATE, request_id="s"))
    like = beliefs.news(replace(tagged, request_id="t", num_committed=7))
    assert other.kind != later.kind == like.kind
    assert beliefs.news(replace(STATE, request_id="u", temperature=1.0)).kind != other.kind
