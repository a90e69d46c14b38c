"""Several drafters in one engine: each drafts where a plan names it, and is told its outcomes."""

from __future__ import annotations

import pytest
from tests import tiny
from tests.faulty import RaisesInForget

from forerun.control.base import Capacity, Controller, Decision, Plan, RequestState
from forerun.drafters.base import Drafter, Pause
from forerun.drafters.draft_model import SelfDraft
from forerun.drafters.registry import SeveralDrafters, named_by_method
from forerun.drafters.suffix import SuffixDrafter
from forerun.engine.observing import EmittedRecords
from forerun.errors import InvalidRequest
from forerun.sampling.config import SamplingParams
from forerun.theory.record import StepRecord


class Turns(Controller):
    """Asks the drafters one after the other."""

    def __init__(self, methods: tuple[str, ...]) -> None:
        self.methods = methods
        self.step = 0

    def decide(self, states: list[RequestState], capacity: Capacity) -> Decision:
        self.step += 1
        return Decision(
            [
                Plan.chain(
                    self.methods[(self.step + at) % len(self.methods)],
                    3,
                )
                for at in range(len(states))
            ]
        )

    def observe(self, records: list[StepRecord]) -> None:
        pass


def test_it_is_a_drafter_called_like_its_first():
    several = SeveralDrafters({"suffix": SuffixDrafter()})
    assert isinstance(several, Drafter)
    assert several.method == "suffix"


def test_a_k_that_one_of_them_cannot_draft_is_refused():
    short = tiny.drafting(tiny.tabular(0), 8)
    short.max_k = 3
    several = SeveralDrafters({"suffix": SuffixDrafter(), "short": short})
    assert tiny.engine_over(tiny.tabular(0), several, num_speculative_tokens=3)
    with pytest.raises(InvalidRequest, match="this short draft proposes at most 3 tokens per step"):
        tiny.engine_over(tiny.tabular(0), several, num_speculative_tokens=4)


def test_drafters_of_one_method_are_numbered():
    model = tiny.tabular(0)
    names = named_by_method([tiny.drafting(model, 8), SuffixDrafter(), tiny.drafting(model, 8)])
    assert list(names) == ["draft_model", "suffix", "draft_model-2"]


def test_self_drafts_have_the_names_that_were_given():
    """The draft in 4 bits is not taken for a second one of `self:int4-int8`."""
    model = tiny.tabular(0)
    given = ["self:int4-int8", "self:int4", "self:2", "self:int4"]
    names = named_by_method([SelfDraft(model, model.vocab_size, name) for name in given])
    assert list(names) == [*given[:3], "self:int4-2"]


class Failing(SuffixDrafter):
    """Fails in one of its calls once a request has ten output tokens."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.call = call

    def propose(self, requests, plans):
        self.check("propose", requests)
        return super().propose(requests, plans)

    def observe(self, outcomes):
        self.check("observe", [outcome.request for outcome in outcomes])
        super().observe(outcomes)

    def check(self, call, requests):
        if call == self.call and any(len(r.ids) - r.num_prompt > 10 for r in requests):
            raise SystemExit("out of order")


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("call", ["propose", "observe"])
def test_the_others_go_on_where_one_fails(call, batch, caplog):
    target = tiny.tabular(0, vocab_size=300, order=1)
    draft = tiny.drafting(tiny.tabular(0, vocab_size=300, order=1))
    drafters = {"suffix": Failing(call), "draft_model": draft}
    engine = tiny.engine_over(target, SeveralDrafters(drafters), controller=Turns(tuple(drafters)))
    records: list[StepRecord] = []
    engine.observers[:] = [EmittedRecords(records.append)]
    prompts = [[1 + at, 2] for at in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    outputs = engine.generate(prompts, params)
    plain = tiny.engine_over(target).generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(lines) == batch
    assert all("drafts without suffix" in line for line in lines)
    late = [r for r in records if r.method == "draft_model" and r.step > 15]
    assert late
    assert all(record.num_drafted for record in late[:-batch])


@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 3}], ids=str)
def test_texts_are_those_of_plain_decoding_with_every_drafter(params):
    target = tiny.adapted(tiny.network())
    drafters = {
        "draft_model": tiny.drafting(tiny.adapted(tiny.network(jitter=0.02))),
        "suffix": SuffixDrafter(),
        "other": tiny.drafting(tiny.adapted(tiny.network(seed=50, num_layers=1))),
    }
    params = SamplingParams(max_tokens=24, ignore_eos=True, **params)
    plain = tiny.engine_over(target).generate(list(tiny.PROMPTS), params)
    engine = tiny.engine_over(target, SeveralDrafters(drafters), controller=Turns(tuple(drafters)))
    records: list[StepRecord] = []
    engine.observers[:] = [EmittedRecords(records.append)]
    outputs = engine.generate(list(tiny.PROMPTS), params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    drafting = {r.method for r in records if r.num_drafted}
    assert drafting >= {"draft_model", "other"}
    accepted = [r for r in records if r.method == "draft_model" and r.num_accepted == 3]
    assert accepted


def test_a_pause_of_one_is_no_pause_of_all():
    class Resting(SuffixDrafter):
        def propose(self, requests, plans):
            return [Pause(num_tokens=50) for _ in requests]

    target = tiny.tabular(0, vocab_size=300, order=1)
    drafters = {
        "suffix": Resting(),
        "draft_model": tiny.drafting(tiny.tabular(0, vocab_size=300, order=1)),
    }
    engine = tiny.engine_over(target, SeveralDrafters(drafters), controller=Turns(tuple(drafters)))
    records: list[StepRecord] = []
    engine.observers[:] = [EmittedRecords(records.append)]
    engine.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert sum(record.num_accepted for record in records) > 6


def test_a_plan_for_nobody_leaves_plain_decoding():
    target = tiny.tabular(0, vocab_size=300, order=1)
    several = SeveralDrafters({"suffix": SuffixDrafter()})
    engine = tiny.engine_over(target, several, controller=Turns(("missing",)))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = engine.generate([[1, 2]], params)
    assert output.token_ids == tiny.engine_over(target).generate([[1, 2]], params)[0].token_ids


@pytest.mark.parametrize("first", [True, False])
def test_a_drafter_that_cannot_forget_does_not_keep_the_others_from_it(first):
    target = tiny.tabular(0, vocab_size=300, order=1)
    draft = tiny.drafting(tiny.tabular(0, vocab_size=300, order=1))
    named = [("suffix", RaisesInForget(SuffixDrafter())), ("draft_model", draft)]
    drafters = dict(named if first else reversed(named))
    engine = tiny.engine_over(target, SeveralDrafters(drafters), controller=Turns(tuple(drafters)))
    engine.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert draft.model.store.num_free == 4


def test_no_drafts_are_refused():
    engine = tiny.engine_over(tiny.tabular(0, vocab_size=300, order=1))
    with pytest.raises(InvalidRequest, match="list of drafts is empty"):
        engine.with_draft([])
