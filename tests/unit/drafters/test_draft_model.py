"""The draft-model drafter: what it proposes, what it keeps, what it gives back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests import tiny
from tests.tabular import TabularModel

from forerun.control.base import Plan
from forerun.drafters.base import Drafter, DraftRequest
from forerun.drafters.draft_model import DraftModel
from forerun.errors import DrafterError
from forerun.models.base import Context
from forerun.sampling.config import SamplingParams
from forerun.sampling.history import History
from forerun.sampling.noise import Purpose, draw, position_key, step_key, uniform
from forerun.sampling.proposal import Choice, Proposal, TokenSource, Verdict
from forerun.sampling.walk import race

GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams()
NOISE_KEY = 1234


@pytest.fixture
def model() -> TabularModel:
    return tiny.tabular(0)


@pytest.fixture
def drafter(model: TabularModel) -> DraftModel:
    return DraftModel(model, 8)


def asked(
    ids: list[int], params: SamplingParams = GREEDY, *, name: str = "r", coupled: bool = False
) -> DraftRequest:
    history = History.of(params, ids, vocab_size=8) if params.needs_history else None
    return DraftRequest(
        request_id=name,
        ids=ids,
        num_prompt=len(ids),
        params=params,
        noise_key=NOISE_KEY,
        history=history,
        coupled=coupled,
    )


def plan(k: int = 3, *, probe: bool = False) -> Plan:
    return Plan.chain("draft_model", k, probe=probe)


def proposed(
    drafter: DraftModel, request: DraftRequest, k: int = 3, *, probe: bool = False
) -> Proposal:
    (proposal,) = drafter.propose([request], [plan(k, probe=probe)])
    assert proposal is not None
    return proposal


def told(
    drafter: DraftModel,
    request: DraftRequest,
    accepted: list[int],
    final: int,
    last: TokenSource = TokenSource.RECOVERED,
) -> None:
    """Commit what the target accepted, then tell the drafter, as the engine does."""
    request.ids.extend([*accepted, final])
    verdict = Verdict(
        path=tuple(range(len(accepted))),
        tokens=(*accepted, final),
        sources=(TokenSource.ACCEPTED,) * len(accepted) + (last,),
        expected_accepted=0.0,
    )
    drafter.observe([tiny.outcome(request, verdict)])


def argmax_chain(model: TabularModel, ids: list[int], k: int) -> list[int]:
    chain: list[int] = []
    for _ in range(k):
        chain.append(int(model.probs([*ids, *chain]).argmax()))
    return chain


def test_it_is_a_drafter(drafter):
    assert isinstance(drafter, Drafter)


@pytest.mark.parametrize("k", [1, 2, 6])
def test_greedy_requests_are_drafted_greedily(model, drafter, k):
    proposal = proposed(drafter, asked([1, 2]), k)
    assert proposal.tokens.tolist() == argmax_chain(model, [1, 2], k)
    assert proposal.choice is Choice.DETERMINISTIC
    assert proposal.draft_probs is None
    assert proposal.tree.is_chain
    assert proposal.stop_reason == "budget"


def test_sampled_chains_carry_the_rows_they_were_drawn_from(model, drafter):
    proposal = proposed(drafter, asked([1, 2], SAMPLED), 4)
    assert proposal.choice is Choice.SAMPLED
    ids = [1, 2]
    for node, (token, row) in enumerate(
        zip(proposal.tokens.tolist(), proposal.draft_probs, strict=True)
    ):
        torch.testing.assert_close(row, model.probs(ids).float())
        key = step_key(NOISE_KEY, 2, node, Purpose.DRAFT)
        assert token == int(draw(row[None], uniform(torch.tensor([key]))))
        ids.append(token)


def test_coupled_chains_race_on_the_targets_clocks(model, drafter):
    proposal = proposed(drafter, asked([1, 2], SAMPLED, coupled=True), 4)
    assert proposal.choice is Choice.COUPLED
    ids = [1, 2]
    for token in proposal.tokens.tolist():
        key = torch.tensor([position_key(NOISE_KEY, len(ids))])
        assert token == int(race(model.probs(ids).float()[None], key))
        ids.append(token)


def test_the_draft_has_its_own_temperature(model, drafter):
    params = SamplingParams(temperature=1.0, draft_temperature=0.5)
    proposal = proposed(drafter, asked([1, 2], params), 1)
    probs = (2 * model.probs([1, 2]).log()).softmax(-1)
    torch.testing.assert_close(proposal.draft_probs[0], probs.float())
    greedily = proposed(drafter, asked([3], SamplingParams(draft_temperature=0), name="s"))
    assert greedily.choice is Choice.DETERMINISTIC
    assert greedily.tokens.tolist() == argmax_chain(model, [3], 3)
    hot = proposed(
        drafter, asked([3], SamplingParams(temperature=0, draft_temperature=2), name="t")
    )
    assert hot.choice is Choice.DETERMINISTIC


def test_requests_of_all_kinds_share_a_pass(drafter):
    requests = [
        asked([1, 2], GREEDY, name="a"),
        asked([4], SAMPLED, name="b"),
        asked([5, 6, 7], SAMPLED, name="c", coupled=True),
    ]
    together = drafter.propose(requests, [plan(3), plan(1), plan(4)])
    for request, proposal, k in zip(requests, together, (3, 1, 4), strict=True):
        alone = DraftModel(tiny.tabular(0), 8)
        assert proposal.tokens.tolist() == proposed(alone, request, k).tokens.tolist()
        assert proposal.num_drafted == k


def test_penalties_count_the_chain_drafted_so_far(model, drafter):
    """So high a penalty that no token is drafted twice."""
    params = SamplingParams(temperature=0, presence_penalty=2.0, repetition_penalty=50.0)
    proposal = proposed(drafter, asked([1], params), 6)
    assert len({1, *proposal.tokens.tolist()}) == 7
    repeated = proposed(DraftModel(model, 8), asked([1]), 6)
    assert len(set(repeated.tokens.tolist())) < 6


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3])
def test_rejected_tokens_are_gone(model, num_accepted):
    """After any verdict it drafts like one that has seen nothing but the committed text."""
    drafter = DraftModel(model, 8)
    request = asked([1, 2])
    tokens = proposed(drafter, request).tokens.tolist()
    told(drafter, request, tokens[:num_accepted], final=5)
    assert proposed(drafter, request).tokens.tolist() == argmax_chain(model, request.ids, 3)
    told(drafter, request, [], final=6)
    assert proposed(drafter, request).tokens.tolist() == argmax_chain(model, request.ids, 3)


def test_steps_it_was_not_asked_for_are_caught_up(model, drafter):
    request = asked([1, 2])
    told(drafter, request, proposed(drafter, request).tokens.tolist()[:1], final=5)
    request.ids.extend([3, 4, 5])
    assert proposed(drafter, request).tokens.tolist() == argmax_chain(model, request.ids, 3)


def test_proposing_twice_without_a_verdict_starts_over(model, drafter):
    """The engine asks again after a pass it could not use."""
    request = asked([1, 2], SAMPLED)
    first, second = proposed(drafter, request), proposed(drafter, request)
    assert first.tokens.tolist() == second.tokens.tolist()


def test_asking_for_some_keeps_the_state_of_others(model, drafter):
    first, second = asked([1, 2], name="a"), asked([3], name="b")
    tokens = proposed(drafter, first).tokens.tolist()
    proposed(drafter, second)
    told(drafter, first, tokens[:2], final=5)
    assert proposed(drafter, first).tokens.tolist() == argmax_chain(model, first.ids, 3)


def test_long_prompts_are_read_in_chunks():
    def long_model() -> TabularModel:
        return TabularModel.from_seed(0, vocab_size=8, max_context=700)

    model = long_model()
    for length in (256, 257, 600):
        prompt = [(7 * i) % 8 for i in range(length)]
        proposal = proposed(DraftModel(long_model(), 8), asked(prompt))
        assert proposal.tokens.tolist() == argmax_chain(model, prompt, 3)


def test_rows_of_a_long_prompt_are_offered_to_others_once_a_proposal_was_verified(monkeypatch):
    """A pass that fails behind the first chunk may have left wrong rows in the cache."""
    model = TabularModel.from_seed(0, vocab_size=8, max_context=700)
    drafter = DraftModel(model, 8)
    prompt = [(7 * i) % 8 for i in range(400)]
    forward = model.forward

    def failing(batch):
        if batch.spans[0].start >= 256:
            raise RuntimeError("the device is gone")
        return forward(batch)

    monkeypatch.setattr(model, "forward", failing)
    with pytest.raises(RuntimeError, match="device"):
        proposed(drafter, replace(asked([*prompt]), scope=""))
    drafter.forget("r")
    assert shared_tokens(model, prompt) == 0

    monkeypatch.setattr(model, "forward", forward)
    request = replace(asked([*prompt]), scope="")
    told(drafter, request, proposed(drafter, request).tokens.tolist(), final=5)
    drafter.forget("r")
    assert shared_tokens(model, prompt) == len(prompt) - 1


def shared_tokens(model: TabularModel, prompt: list[int]) -> int:
    """Tokens that another request with the same prompt finds in the draft's cache."""
    context = Context(model.store, prompt, "")
    num_cached = context.num_cached
    context.close(0)
    return num_cached


def test_the_drafts_own_context_ends_the_chain(drafter):
    room_for_two = asked([1] * (tiny.MAX_CONTEXT - 2), name="a")
    proposal = proposed(drafter, room_for_two, 5)
    assert proposal.num_drafted == 2
    assert proposal.stop_reason == "context"
    full = asked([1] * tiny.MAX_CONTEXT, name="b")
    longer = asked([1] * (tiny.MAX_CONTEXT + 5), name="c")
    sound = asked([1], name="d")
    found = drafter.propose([full, longer, sound], [plan()] * 3)
    assert found[:2] == [None, None]
    assert found[2].num_drafted == 3


def test_slots_are_given_back(model, drafter):
    for name in "abcd":
        proposed(drafter, asked([1, 2], name=name))
    assert model.store.num_free == 0
    drafter.forget("b")
    assert model.store.num_free == 1
    drafter.forget("b")
    drafter.forget("never seen")
    assert model.store.num_free == 1
    for name in "acd":
        drafter.forget(name)
    assert model.store.num_free == 4


def test_a_draft_padded_wider_than_the_target_proposes_only_its_ids(model):
    drafter = DraftModel(model, 5)
    chain = proposed(drafter, asked([1, 2]), 6).tokens.tolist()
    assert max(chain) < 5
    assert chain[0] == int(model.probs([1, 2])[:5].argmax())
    rows = proposed(drafter, asked([1, 2], SAMPLED, name="s")).draft_probs
    assert rows.shape == (3, 5)
    torch.testing.assert_close(rows.sum(-1), torch.ones(3))


def test_a_draft_narrower_than_the_target_never_proposes_its_padding(model):
    rows = proposed(DraftModel(model, 11), asked([1, 2], SAMPLED)).draft_probs
    assert rows.shape == (3, 11)
    assert float(rows[:, 8:].sum()) == 0


def test_texts_with_ids_only_the_target_has_are_refused_before_they_are_read(model):
    drafter = DraftModel(model, model.vocab_size + 2)
    request = asked([1, 2])
    assert drafter.propose([request], [plan()]) != [None]
    told(drafter, request, [], final=model.vocab_size + 1)
    with pytest.raises(DrafterError, match=f"token {model.vocab_size + 1}, but the draft has"):
        drafter.propose([request], [plan()])


@pytest.mark.parametrize("seed", range(3))
def test_a_sampled_chain_ends_before_the_first_invalid_row(seed):
    whole = proposed(DraftModel(tiny.tabular(seed), 8), asked([1, 2], SAMPLED), 4)
    first, second = whole.tokens.tolist()[:2]
    model = tiny.tabular(seed)
    log_probs = model.log_probs.clone()
    log_probs[model.state_of([first, second])] = torch.nan
    sick = TabularModel(log_probs=log_probs, order=model.order, store=model.store)
    ended = proposed(DraftModel(sick, 8), asked([1, 2], SAMPLED), 4)
    assert ended.tokens.tolist() == [first, second]
    assert ended.stop_reason == "invalid_probs"
    assert len(ended.draft_probs) == 2
