"""A target without a usable law: the request is named, the others go on."""

from __future__ import annotations

import math

import pytest
import torch
from tests import tiny
from tests.tabular import TabularModel

from forerun.engine.engine import Engine
from forerun.engine.observing import EmittedRecords
from forerun.errors import NumericalError
from forerun.sampling.config import SamplingParams
from forerun.theory.record import StepRecord

PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
    "greedy with history": SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, repetition_penalty=1.1
    ),
    "seeded": SamplingParams(seed=2, max_tokens=8, ignore_eos=True),
    "block": SamplingParams(seed=2, max_tokens=8, ignore_eos=True, verification="block"),
}
POISON = {"nan": torch.nan, "infinite": torch.inf, "impossible": -torch.inf}


def poisoned(value: float) -> TabularModel:
    """Tokens 5, 6, 7 come only in this order, and after 7 there is no law; 0 to 4 are sound."""
    sound = tiny.tabular(0, order=1)
    law = sound.log_probs.clone()
    law[:, 5:] = -torch.inf
    law = law.log_softmax(-1)
    law[5:7] = -torch.inf
    law[5, 6] = law[6, 7] = 0.0
    law[7] = value
    return TabularModel(log_probs=law, order=1, store=sound.store)


@pytest.fixture(params=["plain", "drafted"])
def engine(request: pytest.FixtureRequest) -> Engine:
    target = poisoned(torch.nan)
    if request.param == "plain":
        return tiny.engine_over(target)
    return tiny.engine_over(target, tiny.drafting(tiny.cousin(poisoned(-9.0), 4, scale=0.3), 8))


def run_out(engine: Engine) -> None:
    while engine.has_unfinished:
        engine.step()


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_the_request_is_named_and_the_others_keep_their_text(engine, params):
    alone = [engine.generate([[start]], params)[0].token_ids for start in (1, 2)]
    engine.add_request([1], params, "sound")
    engine.add_request([5], params, "sick")
    engine.add_request([2], params, "also sound")
    with pytest.raises(NumericalError, match="request sick") as caught:
        run_out(engine)
    assert caught.value.request_id == "sick"
    with pytest.raises(NumericalError, match="request sick"):
        engine.step()
    engine.abort("sick")
    run_out(engine)
    assert engine.take_output("sound").token_ids == alone[0]
    assert engine.take_output("also sound").token_ids == alone[1]
    assert engine.target.store.num_free == 4


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("value", POISON.values(), ids=POISON)
def test_whatever_is_no_law_is_refused(value, params):
    with pytest.raises(NumericalError, match="NaN or infinite"):
        tiny.engine_over(poisoned(value)).generate([[7]], params)


def test_of_several_samples_their_request_is_named(engine):
    params = SamplingParams(seed=1, n=2, max_tokens=8)
    engine.add_request([5], params, "sick")
    with pytest.raises(NumericalError, match="request sick/") as caught:
        run_out(engine)
    engine.abort(caught.value.request_id)
    assert not engine.has_unfinished


def test_generate_leaves_nothing_behind(engine):
    with pytest.raises(NumericalError):
        engine.generate([[1], [5]], PARAMS["seeded"])
    assert not engine.has_unfinished
    assert engine.target.store.num_free == 4
    assert len(engine.generate([[1]], PARAMS["seeded"])[0].token_ids) == 8


def test_parameters_that_leave_no_token():
    """The only token allowed is one the target never says."""
    target = tiny.tabular(0, order=1)
    target.log_probs[:, 7] = -torch.inf
    params = SamplingParams(seed=1, allowed_token_ids=(7,))
    with pytest.raises(NumericalError, match="leave no possible token"):
        tiny.engine_over(target).generate([[1]], params)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_a_draft_may_run_into_the_lawless_as_long_as_the_text_does_not(params):
    """The target never says 7, the draft often: a rejected guess must not fail the request."""
    sound = tiny.tabular(0, order=1)
    law = sound.log_probs.clone()
    law[:, 7] = -torch.inf
    law = law.log_softmax(-1)
    law[7] = torch.nan
    target = TabularModel(log_probs=law, order=1, store=sound.store)
    eager = tiny.tabular(1, order=1)
    eager.log_probs[:, 7] += 3
    eager.log_probs[:] = eager.log_probs.log_softmax(-1)
    records: list[StepRecord] = []
    engine = tiny.engine_over(target, tiny.drafting(eager, 8))
    engine.observers[:] = [EmittedRecords(records.append)]
    found = engine.generate([[1], [2]], params)
    assert sum(record.num_drafted - record.num_accepted for record in records) > 4
    assert all(math.isfinite(record.expected_accepted) for record in records)
    if params.verification != "block":
        plain = tiny.engine_over(target).generate([[1], [2]], params)
        assert [o.token_ids for o in found] == [o.token_ids for o in plain]
    assert not any(7 in output.token_ids for output in found)
