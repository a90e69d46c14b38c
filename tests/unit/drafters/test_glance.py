"""Probes that glance: how much they read, what they say of the text, and what they leave."""

from __future__ import annotations

from dataclasses import replace
from zlib import crc32

import pytest
from tests.unit.drafters.test_draft_model import GREEDY, SAMPLED, asked, plan, proposed, told

from forerun.drafters.base import DraftRequest
from forerun.drafters.draft_model import PREFILL_CHUNK, DraftModel
from forerun.drafters.glance import (
    CLOSE_LOOK,
    GLANCE,
    LEAST_SEEN,
    MOST_SEEN,
    PROMISING,
    SAMPLED_GLANCE,
    UNASKED,
)
from forerun.errors import DrafterError
from forerun.models.base import ModelOutput, RowBatch
from forerun.models.tabular import TabularModel
from forerun.sampling.config import SamplingParams
from forerun.sampling.proposal import Proposal, TokenSource
from forerun.theory.stop_rule import StopRule

PENALISED = SamplingParams(temperature=0, frequency_penalty=1)
SEEN = range(GLANCE // UNASKED, GLANCE)
"""Places of a glance that are looked back at."""
NEVER = 7
"""The token that no draft here proposes."""


class Attentive(TabularModel):
    """What comes next depends on all that was read, so it shows what that was."""

    def state_of(self, ids):
        return crc32(bytes(ids)) % len(self.log_probs)

    def best(self, ids: list[int]) -> int:
        return int(self.probs(ids).argmax())

    def chain(self, read: list[int], k: int) -> list[int]:
        chain: list[int] = []
        for _ in range(k):
            chain.append(self.best([*read, *chain]))
        return chain

    def would(self, read: list[int], num_last: int) -> tuple[int, ...]:
        """Which of the last tokens it would have proposed, had it read this."""
        places = range(len(read) - num_last, len(read))
        return tuple(int(self.best(read[:at]) == read[at]) for at in places)


class Watched(Attentive):
    """It also says how many rows were fed in which pass."""

    def __init__(self, **parts):
        super().__init__(**parts)
        self.fed: list[int] = []
        self.read: list[list[int]] = []

    def forward(self, batch: RowBatch) -> ModelOutput:
        self.fed.append(len(batch.tokens))
        scores = super().forward(batch)
        self.read = [self.store.tokens(s.slot, s.start + s.num_chain) for s in batch.spans]
        return scores

    def taken(self) -> list[int]:
        """Rows fed in every pass since this was asked last."""
        fed, self.fed = self.fed, []
        return fed


def watched(num_slots: int = 1, *, seed: int = 0, vocab_size: int = 8) -> Watched:
    sizes = {"vocab_size": vocab_size, "num_slots": num_slots, "max_context": 700}
    model = Watched.from_seed(seed, order=3, **sizes)
    model.log_probs[:, NEVER] = -50.0
    model.log_probs = model.log_probs.log_softmax(-1)
    return model


@pytest.fixture
def model() -> Watched:
    """A draft with room for one sequence."""
    return watched()


@pytest.fixture
def drafter(model: Watched) -> DraftModel:
    return DraftModel(model, 8)


def text(model: Attentive, length: int, num_right: int, *, start: int = 0) -> list[int]:
    """Of the last tokens so many are what a glance at them proposes."""
    last = [(start + 5 * at * at) % 8 for at in range(SEEN.start)]
    for at in SEEN:
        last.append((model.best(last) + (at - SEEN.start >= num_right)) % 8)
    return [(start + 7 * at) % 8 for at in range(length - GLANCE)] + last


def request_of(
    ids: list[int], num_prompt: int, params: SamplingParams = GREEDY, name: str = "r"
) -> DraftRequest:
    return replace(asked(ids, params, name=name), num_prompt=num_prompt)


def accepted(drafter: DraftModel, request: DraftRequest, proposal: Proposal, bonus: int) -> None:
    """All that was proposed is right."""
    told(drafter, request, proposal.tokens.tolist(), bonus, TokenSource.BONUS)


@pytest.mark.parametrize("num_right", range(len(SEEN) + 1))
def test_more_is_read_exactly_where_the_glance_promises(model, drafter, num_right):
    request = request_of(text(model, 150, num_right), 5)
    read = request.ids[-GLANCE:]
    assert sum(model.would(read, len(SEEN))) == num_right
    proposal = proposed(drafter, request, 1, probe=True)
    if num_right / len(SEEN) >= PROMISING:
        assert model.taken() == [GLANCE, 150]
        read = request.ids
    else:
        assert model.taken() == [GLANCE]
    assert proposal.hindsight == model.would(read, min(MOST_SEEN, len(read) - SEEN.start))
    assert proposal.tokens.tolist() == model.chain(read, 1)


@pytest.mark.parametrize("num_output", [0, 1, LEAST_SEEN - 1, LEAST_SEEN, len(SEEN)])
def test_a_prompt_promises_but_only_output_is_worth_reading_for(model, drafter, num_output):
    request = request_of(text(model, 100, len(SEEN)), 100 - num_output)
    proposal = proposed(drafter, request, 1, probe=True)
    if num_output < LEAST_SEEN:
        assert model.taken() == [GLANCE]
        assert (proposal.hindsight or ()) == (1,) * num_output
        assert proposal.tokens.tolist() == model.chain(request.ids[-GLANCE:], 1)
    else:
        assert model.taken() == [GLANCE, 100]
        assert proposal.hindsight == model.would(request.ids, num_output)
        assert proposal.tokens.tolist() == model.chain(request.ids, 1)


def test_a_glance_at_a_prompt_says_nothing_and_reads_nothing_else(model, drafter):
    request = asked(text(model, 300, 0))
    proposal = proposed(drafter, request, 3, probe=True)
    assert model.taken() == [GLANCE - 1, 1, 1, 1]  # looked at, then drafted from
    assert proposal.hindsight is None
    assert proposal.tokens.tolist() == model.chain(request.ids[-GLANCE:], 3)
    told(drafter, request, proposal.tokens.tolist()[:2], final=5)
    assert proposed(drafter, request).tokens.tolist() == model.chain(request.ids, 3)
    assert model.store.num_free == 0


@pytest.mark.parametrize("length", [25, 40, 71, 72, 100, CLOSE_LOOK])
@pytest.mark.parametrize("k", [1, 3])
def test_what_was_read_more_is_looked_back_at_from_its_beginning(model, drafter, length, k):
    """However short the text: what a glance promised is not to be kept to oneself."""
    request = request_of(text(model, length, len(SEEN)), 1)
    hindsight = proposed(drafter, request, k, probe=True).hindsight
    assert hindsight is not None
    assert len(hindsight) >= LEAST_SEEN
    assert hindsight == model.would(request.ids, len(hindsight))


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("length", [30, 100, CLOSE_LOOK])
def test_a_text_that_was_read_for_a_probe_is_not_read_again(model, drafter, length, k):
    request = request_of(text(model, length, 9), 5)
    proposal = proposed(drafter, request, k, probe=True)
    assert proposal.tokens.tolist() == model.chain(request.ids, k)
    told(drafter, request, proposal.tokens.tolist()[: k - 1], final=proposal.tokens.tolist()[-1])
    model.taken()
    assert proposed(drafter, request, 3).tokens.tolist() == model.chain(request.ids, 3)
    assert model.taken() == [1, 1, 1]
    proposal = proposed(drafter, request, k, probe=True)
    accepted(drafter, request, proposal, bonus=6)
    model.taken()
    assert proposed(drafter, request, 3).tokens.tolist() == model.chain(request.ids, 3)
    assert model.taken() == [2, 1, 1]  # the last of a chain is never fed


@pytest.mark.parametrize("length", [CLOSE_LOOK + 1, 300, 600])
@pytest.mark.parametrize("k", [1, 3])
def test_of_a_long_text_the_last_tokens_are_read_in_the_place_of_all(model, drafter, length, k):
    request = request_of(text(model, length, 9), 5)
    proposal = proposed(drafter, request, k, probe=True)
    looks = [GLANCE, CLOSE_LOOK] if k == 1 else [GLANCE - 1, CLOSE_LOOK - 1, 1, 1, 1]
    assert model.taken() == looks
    read = request.ids[-CLOSE_LOOK:]
    assert proposal.tokens.tolist() == model.chain(read, k)
    assert proposal.hindsight == model.would(read, MOST_SEEN)
    accepted(drafter, request, proposal, bonus=3)
    assert model.store.num_free == 1  # nothing of it serves drafting
    assert proposed(drafter, request).tokens.tolist() == model.chain(request.ids, 3)
    assert max(model.taken()) <= PREFILL_CHUNK


def test_a_draft_that_promised_is_looked_at_closely_until_it_does_not(model, drafter):
    request = request_of(text(model, 400, len(SEEN)), 5)
    promises, reads = False, []
    for at in range(30):
        read, looks = request.ids[-GLANCE:], [GLANCE]
        if promises or sum(model.would(read, len(SEEN))) >= PROMISING * len(SEEN):
            read, looks = request.ids[-CLOSE_LOOK:], [*looks, CLOSE_LOOK][promises:]
        num_seen = MOST_SEEN if len(read) > GLANCE else len(SEEN)
        promises = sum(model.would(read, num_seen)) >= PROMISING * num_seen
        model.taken()
        proposal = proposed(drafter, request, 1, probe=True)
        assert model.taken() == looks
        assert proposal.tokens.tolist() == model.chain(read, 1)
        assert proposal.hindsight == model.would(read, 9 if reads else num_seen)
        reads.append(tuple(looks))
        told(drafter, request, [], final=(int(proposal.tokens[0]) + 1) % 8)
        request.ids.extend((at + 3 * place) % 8 for place in range(9))
    assert set(reads) == {(GLANCE,), (GLANCE, CLOSE_LOOK), (CLOSE_LOOK,)}


@pytest.mark.parametrize("params", [SAMPLED, PENALISED])
@pytest.mark.parametrize("num_right", [0, 9])
@pytest.mark.parametrize("length", [GLANCE, SAMPLED_GLANCE, SAMPLED_GLANCE + 1, 100, 300])
def test_what_shapes_its_distributions_reads_so_much_whatever_it_promises_and_says_nothing(
    model, drafter, params, num_right, length
):
    request = request_of(text(model, length, num_right), 5, params)
    proposal = proposed(drafter, request, 1, probe=True)
    assert model.taken() == [min(length, SAMPLED_GLANCE)]  # in one pass: nobody looks back
    assert proposal.hindsight is None
    alone = DraftModel(watched(), 8)
    expected = proposed(alone, replace(request, ids=request.ids[-SAMPLED_GLANCE:]), 1)
    if params is SAMPLED:
        assert expected.draft_probs.equal(proposal.draft_probs)
    else:
        assert expected.tokens.equal(proposal.tokens)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED])
def test_who_does_not_probe_looks_at_nothing(model, drafter, params):
    request = request_of(text(model, 60, 9), 5, params)
    assert proposed(drafter, request, 1).hindsight is None
    assert model.taken() == [60]


def test_a_probe_with_a_stop_rule_is_stopped_by_it(model, drafter):
    request = request_of(text(model, 150, 9), 5)
    rule = StopRule(measure="top_probability", threshold=0.0)
    (proposal,) = drafter.propose([request], [replace(plan(1, probe=True), stop=rule)])
    assert len(proposal.stop_values) == 1
    assert proposal.tokens.tolist() == model.chain(request.ids, 1)


def test_requests_that_probe_and_others_share_passes_and_do_not_meet():
    model = watched(8)
    drafter = DraftModel(model, 8)
    kinds = [
        (300, 9, GREEDY, 1, True),
        (100, 0, GREEDY, 1, True),
        (100, 9, SAMPLED, 2, True),
        (20, 0, GREEDY, 1, True),
        (150, 9, GREEDY, 3, True),
        (90, 0, SAMPLED, 1, True),
        (120, 12, GREEDY, 4, False),
        (100, 18, GREEDY, 1, True),
    ]
    requests, plans = [], []
    for place, (length, num_right, params, k, probe) in enumerate(kinds):
        ids = text(model, max(length, GLANCE), num_right, start=place)[-length:]
        requests.append(request_of(ids, 5, params, f"r{place}"))
        plans.append(plan(k, probe=probe))
    together = drafter.propose(requests, plans)
    # First who looks back, of whom one is to draft more than the token behind; then who promised;
    # then drafts are made by who did not look back, and by whom that token is not all.
    glances, closer = 5 * GLANCE + 20 - GLANCE - 1, CLOSE_LOOK + 149 + 100
    assert model.taken()[:3] == [glances, closer, 2 * SAMPLED_GLANCE + 120 + 1]
    for request, asked_for, proposal in zip(requests, plans, together, strict=True):
        (alone,) = DraftModel(watched(), 8).propose([request], [asked_for])
        assert proposal.tokens.tolist() == alone.tokens.tolist()
        assert proposal.hindsight == alone.hindsight
        if alone.draft_probs is not None:
            assert proposal.draft_probs.equal(alone.draft_probs)
    assert [proposal.hindsight is None for proposal in together] == [
        params is SAMPLED or not probe for _, _, params, _, probe in kinds
    ]
    for request in requests:
        drafter.forget(request.request_id)
    assert model.store.num_free == 8


def test_nothing_is_looked_back_at_twice(model, drafter):
    """Every glance reads the last tokens anew."""
    request = request_of([1] * 100 + [NEVER] * 100, 100)
    numbers = []
    for _ in range(4):
        numbers.append(len(proposed(drafter, request, 1, probe=True).hindsight or ()))
        request.ids.extend([NEVER] * 5)
    assert numbers == [len(SEEN), 5, 5, 5]
    drafter.forget("r")
    assert len(proposed(drafter, request, 1, probe=True).hindsight) == len(SEEN)


@pytest.mark.parametrize("is_bonus", [False, True])
def test_what_a_verdict_has_told_is_not_looked_back_at(model, drafter, is_bonus):
    """Of a token behind an accepted one nobody was told."""
    request = request_of([1] * 40 + [NEVER] * 20, 40)
    proposal = proposed(drafter, request, 1, probe=True)
    if is_bonus:
        accepted(drafter, request, proposal, bonus=7)
    else:
        told(drafter, request, [], final=7)
    request.ids.extend([NEVER] * 6)
    proposal = proposed(drafter, request, 1, probe=True)
    assert len(proposal.hindsight) == 6 + is_bonus


@pytest.mark.parametrize("is_bonus", [False, True])
def test_what_drafting_has_told_is_not_looked_back_at(model, drafter, is_bonus):
    """It stays known when what was read for it is dropped, and then read anew."""
    request = request_of(text(model, 150, 0), 5)
    proposal = proposed(drafter, request, 3)
    if is_bonus:
        accepted(drafter, request, proposal, bonus=7)
    else:
        told(drafter, request, proposal.tokens.tolist()[:1], final=7)
    request.ids.extend(text(model, GLANCE + 6, 9))
    model.taken()
    proposal = proposed(drafter, request, 1, probe=True)
    assert model.taken() == [GLANCE, len(request.ids)]
    assert proposal.hindsight == model.would(request.ids, GLANCE + 6 + is_bonus)


def test_a_glance_leaves_others_what_was_read_before():
    model = watched(2)
    drafter, ids = DraftModel(model, 8), [(7 * i) % 8 for i in range(100)]
    first = replace(asked(list(ids), name="a"), scope="")
    proposed(drafter, first)
    told(drafter, first, [], final=1)
    drafter.forget("a")
    second = replace(asked([*ids, *[NEVER] * 60], name="b"), scope="")
    proposed(drafter, second, 1, probe=True)
    drafter.forget("b")
    model.taken()
    proposed(drafter, replace(asked([*ids, 2], name="c"), scope=""), 1)
    assert sum(model.taken()) < 5


@pytest.mark.parametrize("ends", ["unproven", "forgotten", "rejected", "accepted"])
@pytest.mark.parametrize("still_drafting", [False, True])
def test_a_close_look_begins_with_what_others_read_and_leaves_it_to_others(ends, still_drafting):
    model = watched(3)
    drafter = DraftModel(model, 8)
    ids = text(model, 150, 9)
    first = replace(asked(ids[:100], name="a"), scope="")
    proposed(drafter, first)
    told(drafter, first, [], final=(ids[100] + 1) % 8)
    if not still_drafting:
        drafter.forget("a")
    second = replace(request_of(list(ids), 100, name="b"), scope="")
    model.taken()
    k = 2 if ends == "unproven" else 1  # what nobody has judged is not for others
    proposal = proposed(drafter, second, k, probe=True)
    assert model.taken() == ([GLANCE, 50] if k == 1 else [GLANCE - 1, 49, 1, 1])
    assert proposal.tokens.tolist() == model.chain(ids, k)
    assert proposal.hindsight == model.would(ids, MOST_SEEN)
    if ends == "accepted":
        accepted(drafter, second, proposal, bonus=2)
    elif ends == "rejected":
        told(drafter, second, [], final=2)
    drafter.forget("b")
    third = replace(asked([*ids, 2, 3], name="c"), scope="")
    model.taken()
    assert proposed(drafter, third, 2).tokens.tolist() == model.chain(third.ids, 2)
    num_new = {"unproven": 52 if still_drafting else 152, "forgotten": 52}.get(ends, 2)
    assert model.taken() == [num_new, 1]
    if still_drafting:
        assert proposed(drafter, first).tokens.tolist() == model.chain(first.ids, 3)


@pytest.mark.parametrize("length", [100, 300])
@pytest.mark.parametrize("num_right", [0, 9])
def test_a_slot_is_given_back_whatever_becomes_of_a_probe(model, drafter, length, num_right):
    request = request_of(text(model, length, num_right), 5)
    expected = proposed(drafter, request, 3, probe=True)
    again = proposed(drafter, request, 3, probe=True)  # the engine could not use the first
    assert again.hindsight is None
    if not num_right:  # else it may have read on
        assert again.tokens.equal(expected.tokens)
    drafter.forget("r")
    assert model.store.num_free == 1
    accepted(drafter, request, proposed(drafter, request, 3, probe=True), bonus=1)
    drafter.forget("r")
    assert model.store.num_free == 1


def test_a_probe_that_has_little_to_catch_up_with_reads_it(model, drafter):
    request = request_of(text(model, GLANCE, 5), 1)
    proposal = proposed(drafter, request, 1, probe=True)
    assert model.taken() == [GLANCE]
    assert proposal.hindsight == model.would(request.ids, len(SEEN))
    told(drafter, request, [], final=5)
    assert proposed(drafter, request).tokens.tolist() == model.chain(request.ids, 3)
    assert model.taken() == [1, 1, 1]


@pytest.mark.parametrize("length", [100, 300])
def test_a_close_look_at_ids_that_only_the_target_has_is_refused(length):
    """None of them is in the glance that promised something."""
    model = watched(vocab_size=8)
    ids = text(model, length, len(SEEN))
    ids[length - 50] = 9
    with pytest.raises(DrafterError, match="token 9; the draft has"):
        proposed(DraftModel(model, 10), request_of(ids, 5), 1, probe=True)
