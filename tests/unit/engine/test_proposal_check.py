"""Checks of a whole step: what a drafter vouches for, and only that, is not looked at again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests import tiny
from tests.faulty import DAMAGES, Damage

from forerun.control.base import Plan
from forerun.drafters.base import DraftRequest
from forerun.drafters.draft_model import DraftModel
from forerun.engine import drafting
from forerun.engine.drafting import check_proposals
from forerun.engine.scheduler import ScheduledSequence
from forerun.errors import ForerunError
from forerun.sampling.config import SamplingParams
from forerun.sampling.proposal import Assurance, Choice, Proposal

pytestmark = pytest.mark.usefixtures("unchecked")


def entries(num: int) -> list[ScheduledSequence]:
    plan = Plan.chain("draft_model", 3)
    return [tiny.scheduled(tiny.sequence(str(i), num_prompt=1), plan) for i in range(num)]


def drafted(num: int, params: SamplingParams) -> list[Proposal]:
    """What a draft model proposes for `num` requests."""
    requests = [
        DraftRequest(
            request_id=str(i),
            ids=[1, i],
            num_prompt=2,
            params=params,
            noise_key=i,
            history=None,
            coupled=False,
        )
        for i in range(num)
    ]
    plan = Plan.chain("draft_model", 3)
    proposals = DraftModel(tiny.tabular(0), 8).propose(requests, [plan] * num)
    return [proposal for proposal in proposals if proposal is not None]


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Proposal]:
    """Proposals whose rows the check has read."""
    seen: list[Proposal] = []
    figures = drafting.probs_figures

    def watching(proposal: Proposal) -> torch.Tensor:
        seen.append(proposal)
        return figures(proposal)

    monkeypatch.setattr(drafting, "probs_figures", watching)
    return seen


def check(proposals: Sequence[Proposal | None]) -> None:
    check_proposals(entries(len(proposals)), proposals, 8)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0)])
def test_a_draft_model_vouches_for_what_it_made(params, looked_at):
    proposals = drafted(3, params)
    assert len(proposals) == 3
    assert all(proposal.is_assured for proposal in proposals)
    check(proposals)
    assert looked_at == []


def test_without_its_word_everything_is_looked_at(looked_at):
    proposals = [replace(proposal, assurance=None) for proposal in drafted(3, SamplingParams())]
    check(proposals)
    assert looked_at == proposals


def test_the_word_holds_for_these_tensors_alone(looked_at):
    (proposal,) = drafted(1, SamplingParams())
    copied = [
        replace(proposal, tokens=proposal.tokens.clone()),
        replace(proposal, draft_probs=proposal.draft_probs.clone()),
        replace(proposal, assurance=Assurance(tokens=proposal.tokens, draft_probs=None)),
    ]
    assert not any(each.is_assured for each in copied)
    check(copied)
    assert looked_at == copied


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_one_damaged_proposal_among_sound_ones_is_refused(damage: Damage):
    sound = drafted(3, SamplingParams())
    check(sound)
    with pytest.raises(ForerunError):
        check([sound[0], damage(sound[1]), sound[2]])


def test_a_draft_that_is_nan_from_the_start_vouches_for_nothing():
    model = tiny.tabular(0)
    model.log_probs.fill_(torch.nan)
    request = DraftRequest(
        request_id="r",
        ids=[1],
        num_prompt=1,
        params=SamplingParams(),
        noise_key=1,
        history=None,
        coupled=False,
    )
    plan = Plan.chain("draft_model", 3)
    (proposal,) = DraftModel(model, 8).propose([request], [plan])
    assert proposal is not None
    assert proposal.choice is Choice.SAMPLED
    assert not proposal.is_assured
    with pytest.raises(ForerunError, match="NaN"):
        check([proposal])


def test_nothing_drafted_is_nothing_to_check(looked_at):
    check([None, None])
    check([])
    assert looked_at == []
