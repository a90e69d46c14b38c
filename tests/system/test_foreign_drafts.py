"""Drafts with other tokenizers than the target's: the text is that of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests import foreign, tiny

from forerun.drafters.base import Drafter
from forerun.drafters.foreign import (
    SharedTokenDraft,
    SharedTokenModel,
    TextDraft,
    foreign_drafter,
)
from forerun.drafters.vocabulary_map import map_vocabularies
from forerun.engine.engine import Engine
from forerun.engine.observing import EmittedRecords
from forerun.errors import DrafterError
from forerun.models.base import WrappedModel, chain_by_forward
from forerun.models.tokenizers import Tokenizer
from forerun.sampling.config import SamplingParams
from forerun.testing.conformance import check_drafter
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.record import StepRecord

pytestmark = pytest.mark.usefixtures("unchecked")
PROMPTS = [tiny.tokenizer().encode(text) for text in (*tiny.PROMPTS, "na\u00efve \u4e2d\u6587")]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.8, seed=11)


def drafter_of(way: str, draft: Tokenizer) -> Drafter:
    """A drafter of a random model, in the way that is asked for."""
    size = len(draft.vocabulary)
    model = tiny.adapted(tiny.network(seed=50, num_layers=1, vocab_size=size, max_context=192))
    vocabulary = map_vocabularies(tiny.tokenizer(), draft)
    if way == "slem":
        return TextDraft(model, vocabulary)
    shared = SharedTokenModel(model, vocabulary, tiny.VOCAB_SIZE)
    return SharedTokenDraft(shared, vocabulary, tiny.VOCAB_SIZE)


def likely_drafter(way: str) -> Drafter:
    """A drafter that agrees with the target: the same network with its tokens under other ids."""
    tokenizer, order = foreign.permuted()
    model = tiny.adapted(foreign.renumbered(tiny.network(), order))
    if way == "tli":
        return foreign_drafter(model, tokenizer, tiny.tokenizer(), tiny.VOCAB_SIZE)
    return TextDraft(model, map_vocabularies(tiny.tokenizer(), tokenizer))


class Restricted(WrappedModel):
    """A model that says some tokens only."""

    def __init__(self, model, ids) -> None:
        super().__init__(model)
        self.ids = ids

    def forward(self, batch):
        output = self.model.forward(batch)
        logits = torch.full_like(output.logits, -torch.inf)
        logits[:, self.ids] = output.logits[:, self.ids]
        return replace(output, logits=logits)

    def greedy_chain(self, batch, num_tokens, vocab_size):
        return chain_by_forward(self, batch, num_tokens, vocab_size)


FACTORIES: dict[str, Callable[[], Drafter]] = {
    f"{way}, {kind}": lambda way=way, kind=kind: drafter_of(way, foreign.DRAFTS[kind]())
    for way in ("tli", "slem")
    for kind in foreign.DRAFTS
} | {f"{way}, permuted": lambda way=way: likely_drafter(way) for way in ("tli", "slem")}


@pytest.fixture(scope="module")
def target():
    return tiny.adapted(tiny.network())


# The contract is about requests that come and go, which no tokenizer changes: a draft that is
# accepted, whose text is read again. Texts are compared for all, below.
CONFORMING = ("slem, permuted",)


@pytest.mark.parametrize(
    "name",
    [n if n in CONFORMING else pytest.param(n, marks=pytest.mark.full) for n in FACTORIES],
)
def test_a_foreign_draft_fulfils_the_contract(target, name):
    check_drafter(
        FACTORIES[name], target, tiny.tokenizer(), prompts=PROMPTS[:4], max_tokens=16, num_sampled=6
    )


def generated(engine: Engine, params: SamplingParams) -> tuple[list[str], AcceptanceCounts]:
    records: list[StepRecord] = []
    engine.observers[:] = [EmittedRecords(records.append)]
    outputs = engine.generate(PROMPTS, params)
    return [output.text for output in outputs], AcceptanceCounts.from_records(records)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", FACTORIES)
def test_text_in_batches_is_that_of_plain_decoding(target, name, params):
    plain, _ = generated(tiny.engine_over(target), params)
    found, counts = generated(tiny.engine_over(target, FACTORIES[name]()), params)
    assert found == plain
    assert sum(counts.drafted_per_position) > 0


@pytest.mark.parametrize("way", ["tli", "slem"])
def test_a_draft_that_says_what_the_target_says_is_accepted(target, way):
    """Its tokens have other ids, and none of these letters is ever part of a longer token."""
    letters = tiny.tokenizer().encode("QZXJVBKWQ")
    params = replace(GREEDY, allowed_token_ids=tuple({*letters}))
    drafter = likely_drafter(way)
    if way == "slem":  # whose draft does not know what the request allows
        drafter.draft.model = Restricted(drafter.draft.model, foreign.permuted()[1][letters])
    engine = tiny.engine_over(target, drafter)
    records: list[StepRecord] = []
    engine.observers[:] = [EmittedRecords(records.append)]
    (output,) = engine.generate([letters], params)
    (plain,) = tiny.engine_over(target).generate([letters], params)
    assert output.token_ids == plain.token_ids
    assert AcceptanceCounts.from_records(records).draft_acceptance_rate > 0.99


@pytest.mark.parametrize("way", ["tli", "slem"])
def test_a_stream_is_the_text_of_plain_decoding(target, way):
    engine = tiny.engine_over(target, likely_drafter(way))
    (expected,) = tiny.engine_over(target).generate(PROMPTS[:1], SEEDED)
    shown = "".join(chunk.text for chunk in engine.stream(PROMPTS[0], SEEDED))
    assert shown == expected.text


@pytest.mark.parametrize("way", ["tli", "slem"])
def test_tokens_to_which_a_request_is_restricted(target, way):
    allowed = tuple(range(100, 140))
    params = replace(GREEDY, allowed_token_ids=allowed)
    engine = tiny.engine_over(target, likely_drafter(way))
    plain = tiny.engine_over(target).generate(PROMPTS, params)
    assert [o.token_ids for o in engine.generate(PROMPTS, params)] == [o.token_ids for o in plain]


def test_shared_tokens_that_a_model_has_no_logit_for_are_not_drafted():
    """A tokenizer may have more tokens than its model: here the draft's and the target's have."""
    tokenizer, order = foreign.permuted()
    vocabulary = map_vocabularies(tiny.tokenizer(), tokenizer)
    model = tiny.adapted(tiny.network(num_layers=1, vocab_size=200))
    logits = tiny.logits_of(SharedTokenModel(model, vocabulary, 250), [3, 5])
    assert logits.isneginf().tolist() == [(order[:250] >= 200).tolist()] * 2


def test_a_text_longer_than_the_drafts_context_goes_on_plainly(target):
    letters = tiny.tokenizer().encode("QZXJVBKWQ")
    params = replace(GREEDY, allowed_token_ids=tuple({*letters}))
    model = tiny.adapted(tiny.network(num_layers=1, vocab_size=100, max_context=24))
    drafter = TextDraft(model, map_vocabularies(tiny.tokenizer(), foreign.characters("")))
    engine = tiny.engine_over(target, drafter)
    records: list[StepRecord] = []
    engine.observers[:] = [EmittedRecords(records.append)]
    (output,) = engine.generate([letters], params)
    (plain,) = tiny.engine_over(target).generate([letters], params)
    assert output.token_ids == plain.token_ids
    drafted = [record.num_drafted for record in records]
    assert drafted[1] > 0
    assert drafted[-1] == 0


def test_rows_of_the_draft_are_cut_back_where_tokens_change(target):
    """The committed rows of the draft are always those of the text in its own tokens."""
    drafter = likely_drafter("tli")
    engine = tiny.engine_over(target, drafter)
    fed: list[int] = []
    forward = drafter.model.model.forward

    def counted(batch):
        fed.append(len(batch.tokens))
        return forward(batch)

    drafter.model.model.forward = counted
    engine.generate([PROMPTS[2]], GREEDY)
    assert sum(fed[1:]) / len(fed[1:]) < 4  # and not the whole text again in every step


@pytest.mark.parametrize("way", ["tli", "slem"])
def test_ids_of_drafted_tokens_are_kept_only_where_their_rows_are(target, way):
    drafter = likely_drafter(way)
    own = drafter if way == "tli" else drafter.draft
    noted, num_checked = own._note_committed, 0

    def checked(request_id, drafted):
        nonlocal num_checked
        noted(request_id, drafted)
        context = own._sequences[request_id].context
        num_checked += 1
        assert len(context.ids) <= max(own.num_read(request_id), context.num_cached)

    own._note_committed = checked
    tiny.engine_over(target, drafter).generate(PROMPTS[:2], GREEDY)
    assert num_checked > 4


def test_errors_of_the_draft_leave_the_text_alone(target, monkeypatch):
    def fails(*_: object) -> bool:
        raise DrafterError("broken")

    drafter = likely_drafter("slem")
    monkeypatch.setattr(drafter.draft, "read", fails)
    found, _ = generated(tiny.engine_over(target, drafter), GREEDY)
    assert found == generated(tiny.engine_over(target), GREEDY)[0]
