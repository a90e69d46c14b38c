"""Acceptance estimates: pools, requests, and what is forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as changed
from tests.records import STEP

from forerun.control.base import RequestState
from forerun.control.beliefs import Beliefs, DraftVariant
from forerun.control.config import MAX_POOLS, BeliefConfig
from forerun.theory.drift import Memory
from forerun.theory.record import StepRecord

STATE = RequestState(request_id="r", num_committed=100, max_new=500, temperature=0.0)
WAY = DraftVariant("d", stops=False)


def outcome(accepted: int, **changes) -> StepRecord:
    return changed(
        STEP, request_id="r", k_budget=1, depth_drafted=1, num_accepted=accepted, **changes
    )


def first_position(beliefs: Beliefs) -> float:
    return beliefs.curve(STATE, WAY, 4).survival[0]


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
        beliefs.observe(changed(outcome(0), request_id="other"), WAY)
    for _ in range(num_own):
        beliefs.observe(outcome(1), WAY)
    (pool,) = beliefs.curve(fresh, WAY, 1).survival
    expected = (num_own + strength * pool) / (num_own + strength)
    assert first_position(beliefs) == pytest.approx(expected)


def test_tokens_since_the_last_draft_are_counted():
    beliefs = Beliefs(BeliefConfig())
    assert beliefs.num_unread(STATE) == 100
    beliefs.observe(outcome(1, context_tokens=100, num_emitted=2), WAY)
    assert beliefs.num_unread(replace(STATE, num_committed=130)) == 28


def test_tags_without_end_do_not_take_memory_without_end():
    beliefs = Beliefs(BeliefConfig())
    for number in range(MAX_POOLS + 50):
        beliefs.curve(replace(STATE, request_id=f"r{number}", tags=(f"t{number}",)), WAY, 1)
    assert len(beliefs._pools) == MAX_POOLS
