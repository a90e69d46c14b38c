"""What is believed of drafts: of those that were made, and of those a probe would have made."""

from __future__ import annotations

from dataclasses import replace

from tests.records import STEP

from forerun.control.base import RequestState
from forerun.control.beliefs import Beliefs, Way
from forerun.control.config import BeliefConfig
from forerun.theory.record import StepRecord

STATE = RequestState(request_id="r", num_committed=100, max_new=500, temperature=0.0)
WAY = Way("d", stops=False)


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
