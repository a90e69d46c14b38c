"""A drafter may do anything: the text is that of plain decoding and one line says why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from tests import tiny

from forerun.control.base import Plan
from forerun.drafters.base import Drafter, DraftRequest, Outcome
from forerun.drafters.draft_model import DraftModel
from forerun.models.tabular import TabularModel
from forerun.sampling.config import SamplingParams
from forerun.sampling.proposal import Choice, Proposal
from forerun.theory.tree import TokenTree

PROMPTS = [[1, 2, 3], [4, 4], [5, 6, 7, 1], [2, 2]]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
SEEDED = SamplingParams(seed=5, max_tokens=14, ignore_eos=True)
# What each sequence of `PROMPTS` is called when it is the first call of an engine.
KEYS = [f"request-{index}" for index in range(len(PROMPTS))]

Damage = Callable[[Proposal], Proposal]


class Faulty:
    """A sound drafter with something wrong in it: override what goes wrong."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.num_proposals = 0
        self.num_observations = 0

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        self.num_proposals += 1
        return self.inner.propose(requests, plans)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self.num_observations += 1
        self.inner.observe(outcomes)

    def forget(self, request_id: str) -> None:
        self.inner.forget(request_id)


class RaisesAlways(Faulty):
    def propose(self, requests, plans):
        super().propose(requests, plans)
        raise RuntimeError("no luck")


class RaisesOnce(Faulty):
    """On the third batch, after drafting; whoever is not forgotten then has half a state."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.half_done: set[str] = set()

    def propose(self, requests, plans):
        if not self.half_done.isdisjoint(request.request_id for request in requests):
            raise RuntimeError("half a state")
        proposals = super().propose(requests, plans)
        if self.num_proposals == 3:
            self.half_done = {request.request_id for request in requests}
            raise RuntimeError("out of luck")
        return proposals

    def forget(self, request_id):
        super().forget(request_id)
        self.half_done.discard(request_id)


class RaisesOnOneRow(Faulty):
    def propose(self, requests, plans):
        proposals = super().propose(requests, plans)
        if any(request.request_id == KEYS[2] for request in requests):
            raise RuntimeError("not that one")
        return proposals


class WrongNumber(Faulty):
    def propose(self, requests, plans):
        return super().propose(requests, plans)[:-1]


class RaisesInObserve(Faulty):
    def observe(self, outcomes):
        super().observe(outcomes)
        raise RuntimeError("did not see")


class RaisesOnceInObserve(Faulty):
    def observe(self, outcomes):
        super().observe(outcomes)
        if self.num_observations == 2:
            raise RuntimeError("blinked")


class RaisesInObserveOfOneRow(Faulty):
    def observe(self, outcomes):
        super().observe(outcomes)
        if any(outcome.request_id == KEYS[2] for outcome in outcomes):
            raise RuntimeError("did not see that one")


class RaisesInForget(Faulty):
    def forget(self, request_id):
        super().forget(request_id)
        raise RuntimeError("cannot forget")


class Damaging(Faulty):
    """Damages every proposal of one request."""

    def __init__(self, inner: Drafter, damage: Damage) -> None:
        super().__init__(inner)
        self.damage = damage

    def propose(self, requests, plans):
        proposals = super().propose(requests, plans)
        return [
            self.damage(proposal) if proposal and request.request_id == KEYS[2] else proposal
            for request, proposal in zip(requests, proposals, strict=True)
        ]


def longer(proposal: Proposal) -> Proposal:
    tokens = torch.cat([proposal.tokens, torch.tensor([1])])
    return replace(proposal, tokens=tokens, tree=TokenTree.chain(len(tokens)))


def too_many_nodes(proposal: Proposal) -> Proposal:
    for _ in range(4):
        proposal = longer(proposal)
    return proposal


def tokens_short_of_the_tree(proposal: Proposal) -> Proposal:
    return replace(proposal, tokens=proposal.tokens[:-1])


def id_past_the_vocabulary(proposal: Proposal) -> Proposal:
    return replace(proposal, tokens=proposal.tokens + 8)


def negative_id(proposal: Proposal) -> Proposal:
    return replace(proposal, tokens=proposal.tokens - 8)


def fractional_ids(proposal: Proposal) -> Proposal:
    return replace(proposal, tokens=proposal.tokens + 0.5)


def nan_draft_probs(proposal: Proposal) -> Proposal:
    return replace(proposal, draft_probs=torch.full((proposal.num_drafted, 8), torch.nan))


def infinite_draft_probs(proposal: Proposal) -> Proposal:
    return replace(proposal, draft_probs=torch.full((proposal.num_drafted, 8), torch.inf))


def sampled(proposal: Proposal, probs: torch.Tensor | None) -> Proposal:
    return replace(proposal, choice=Choice.SAMPLED, draft_probs=probs)


def no_draft_probs(proposal: Proposal) -> Proposal:
    return sampled(proposal, None)


def draft_probs_of_another_vocabulary(proposal: Proposal) -> Proposal:
    return sampled(proposal, torch.full((proposal.num_drafted, 7), 1 / 7))


def draft_probs_short_of_a_row(proposal: Proposal) -> Proposal:
    return sampled(proposal, torch.full((proposal.num_drafted - 1, 8), 1 / 8))


def draft_probs_that_are_logits(proposal: Proposal) -> Proposal:
    rows = torch.tensor([[3.0, 2, 1, 0, -1, -2, -3, 0]])
    return sampled(proposal, rows.expand(proposal.num_drafted, 8))


def negative_draft_probs(proposal: Proposal) -> Proposal:
    rows = torch.tensor([[-0.5, 1.5, 0, 0, 0, 0, 0, 0]])
    tokens = torch.ones_like(proposal.tokens)
    return replace(sampled(proposal, rows.expand(proposal.num_drafted, 8)), tokens=tokens)


def impossible_draw(proposal: Proposal) -> Proposal:
    rows = torch.tensor([[0, 1.0, 0, 0, 0, 0, 0, 0]])
    tokens = torch.full_like(proposal.tokens, 5)
    return replace(sampled(proposal, rows.expand(proposal.num_drafted, 8)), tokens=tokens)


def draft_probs_without_nodes(proposal: Proposal) -> Proposal:
    rows = torch.full((proposal.num_drafted, 8), 1 / 8)
    return replace(sampled(proposal, rows), tokens=proposal.tokens[:0], tree=TokenTree.chain(0))


def draft_probs_rounded_to_bf16(proposal: Proposal) -> Proposal:
    """Each row adds up to 0.998: harmless to look at, a bias of the text nevertheless."""
    rows = torch.tensor([[0.9, *[0.1 / 7] * 7]]).bfloat16()
    return sampled(proposal, rows.expand(proposal.num_drafted, 8))


DAMAGES = (
    too_many_nodes,
    tokens_short_of_the_tree,
    id_past_the_vocabulary,
    negative_id,
    fractional_ids,
    nan_draft_probs,
    infinite_draft_probs,
    no_draft_probs,
    draft_probs_of_another_vocabulary,
    draft_probs_short_of_a_row,
    draft_probs_that_are_logits,
    negative_draft_probs,
    impossible_draw,
    draft_probs_without_nodes,
    draft_probs_rounded_to_bf16,
)


pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture
def target() -> TabularModel:
    return tiny.tabular(0)


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
