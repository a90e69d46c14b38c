"""Requests the engine refuses, and requests that come and go."""

from __future__ import annotations

import pytest
from tests import tiny
from tests.tabular import TabularModel

from forerun.engine.engine import STEPS_BETWEEN_RETURNS, Engine
from forerun.errors import InvalidRequest
from forerun.sampling.config import SamplingParams

PARAMS = SamplingParams(seed=1, max_tokens=6, ignore_eos=True)


@pytest.fixture
def engine(target: TabularModel, draft: TabularModel) -> Engine:
    return tiny.engine_over(target, tiny.drafting(draft, 8))


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt(engine, prompt):
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        engine.add_request(prompt)


def test_a_prompt_that_leaves_no_room(engine):
    engine.add_request([1] * (tiny.MAX_CONTEXT - 1))
    with pytest.raises(InvalidRequest, match=r"the prompt has 96 tokens.*holds 96"):
        engine.add_request([1] * tiny.MAX_CONTEXT)


def test_the_context_may_be_set_below_the_models(target):
    engine = tiny.engine_over(target, max_context=10)
    assert engine.max_context == 10
    with pytest.raises(InvalidRequest, match="holds 10"):
        engine.add_request([1] * 10)
    (output,) = engine.generate([[1] * 7], SamplingParams(seed=1, ignore_eos=True))
    assert len(output.token_ids) == 3


@pytest.mark.parametrize("token", [-1, 8])
def test_a_prompt_token_the_model_does_not_have(engine, token):
    with pytest.raises(InvalidRequest, match=rf"prompt token {token} is outside 0\.\.7"):
        engine.add_request([1, token])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {8: 1.0}),
        ("allowed_token_ids", (1, 8)),
        ("bad_token_ids", (8,)),
        ("stop_token_ids", (8,)),
    ],
)
def test_a_parameter_naming_a_token_the_model_does_not_have(engine, name, value):
    with pytest.raises(InvalidRequest, match=rf"{name} names token 8, outside 0\.\.7"):
        engine.add_request([1], SamplingParams(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", -0.1), ("top_p", 0.0), ("top_p", 1.1), ("max_tokens", 0)]
)
def test_a_sampling_parameter_out_of_range(name, value):
    with pytest.raises(InvalidRequest, match=f"{name} is {value}"):
        SamplingParams(**{name: value})


def test_as_many_parameters_as_prompts(engine):
    with pytest.raises(InvalidRequest, match="1 sampling parameters for 2 prompts"):
        engine.generate([[1], [2]], [PARAMS])


def test_one_bad_prompt_queues_nothing(engine, target):
    with pytest.raises(InvalidRequest):
        engine.generate([[1], [2], []], PARAMS)
    assert not engine.has_unfinished
    assert target.store.num_free == 4
    assert engine.add_request([1], PARAMS, "request-0") == "request-0"


def test_an_id_in_use(engine):
    engine.add_request([1], PARAMS, "mine")
    with pytest.raises(InvalidRequest, match="'mine' is already in use"):
        engine.add_request([2], PARAMS, "mine")


def test_an_id_that_is_a_sample_of_another_request(engine):
    """Drafters know samples by name: two of one name would share a state."""
    two = SamplingParams(seed=1, n=2)
    engine.add_request([1], two, "a")
    with pytest.raises(InvalidRequest, match="'a/1' is already in use"):
        engine.add_request([2], PARAMS, "a/1")
    engine.add_request([1], PARAMS, "b/0")
    with pytest.raises(InvalidRequest, match="'b' is already in use"):
        engine.add_request([2], two, "b")
    engine.abort("a")
    engine.add_request([2], PARAMS, "a/1")


def test_ids_that_are_made_up_avoid_those_given(engine):
    engine.add_request([1], PARAMS, "request-0")
    assert engine.add_request([1], PARAMS) == "request-1"
    engine.add_request([1], PARAMS, "request-2")
    assert engine.add_request([1], PARAMS) == "request-3"


def test_outputs_are_taken_once_and_when_finished(engine):
    request_id = engine.add_request([1], PARAMS)
    with pytest.raises(InvalidRequest, match="has not finished"):
        engine.take_output(request_id)
    while engine.has_unfinished:
        engine.step()
    output = engine.take_output(request_id)
    assert len(output.token_ids) == 6
    assert output.prompt_token_ids == (1,)
    with pytest.raises(InvalidRequest, match="there is no request"):
        engine.take_output(request_id)


def test_a_text_is_a_prompt(target):
    network = tiny.adapted(tiny.network())
    engine = tiny.engine_over(network)
    ids = tiny.tokenizer().encode("import os\n")
    by_text, by_ids = engine.generate("import os\n", PARAMS), engine.generate([ids], PARAMS)
    assert by_text[0].prompt_token_ids == tuple(ids)
    assert by_text[0].text == by_ids[0].text


def test_no_prompts_no_outputs(engine):
    assert engine.generate([]) == []
    assert engine.step() == []


def test_parameters_are_optional(engine):
    (output,) = engine.generate([[1] * (tiny.MAX_CONTEXT - 3)])
    assert 1 <= len(output.token_ids) <= 3


@pytest.mark.parametrize("num_steps", range(5))
def test_abort_in_every_state_leaves_the_others_their_text(target, draft, num_steps):
    """With chunks of two tokens the request is waiting, reading its prompt or decoding."""
    engine = tiny.engine_over(target, tiny.drafting(draft, 8), max_batch=2, prefill_chunk=2)
    prompts = {"a": [1, 2, 3], "b": [3, 1, 4, 1, 5, 2, 6], "c": [2, 7]}
    alone = {name: engine.generate([ids], PARAMS)[0].token_ids for name, ids in prompts.items()}
    for victim in prompts:
        for name, ids in prompts.items():
            engine.add_request(ids, PARAMS, name)
        for _ in range(num_steps):
            engine.step()
        engine.abort(victim)
        while engine.has_unfinished:
            assert all(chunk.request_id != victim for chunk in engine.step())
        for name in prompts.keys() - {victim}:
            assert engine.take_output(name).token_ids == alone[name]
        assert (target.store.num_free, draft.store.num_free) == (4, 4)


def test_aborting_what_is_unknown_or_finished_is_nothing(engine, target):
    engine.abort("nobody")
    request_id = engine.add_request([1], PARAMS)
    while engine.has_unfinished:
        engine.step()
    engine.abort(request_id)
    engine.abort(request_id)
    assert target.store.num_free == 4


def test_samples_of_a_request_are_numbered_and_independent_of_how_many(engine):
    four = SamplingParams(seed=3, max_tokens=12, n=4, ignore_eos=True)
    (many,) = engine.generate([[1, 2]], four)
    (one,) = engine.generate([[1, 2]], SamplingParams(seed=3, max_tokens=12, ignore_eos=True))
    assert [completion.index for completion in many.completions] == [0, 1, 2, 3]
    assert many.token_ids == one.token_ids
    assert len({completion.token_ids for completion in many.completions}) == 4


def test_without_a_seed_texts_differ(engine):
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    first, second = engine.generate([[1], [1]], params)
    assert first.token_ids != second.token_ids


def test_an_engine_with_another_draft_shares_the_target(engine, target):
    other = engine.with_draft(None, 0)
    assert other.target is target
    assert other.drafter is None
    assert other.config.num_speculative_tokens == 0
    assert other.generate([[1]], PARAMS)[0].token_ids == engine.generate([[1]], PARAMS)[0].token_ids


def test_a_batch_waits_for_slots_another_engine_holds(engine, target):
    other = engine.with_draft(None)
    for _ in range(3):
        other.add_request([1], PARAMS)
    other.step()
    assert target.store.num_free == 1
    outputs = engine.generate([[1], [2], [3]], PARAMS)
    assert all(len(output.token_ids) == 6 for output in outputs)


def test_freed_memory_is_returned_while_requests_come_and_go(engine, monkeypatch):
    """Without it an engine of 64 sequences grew by a gigabyte in three minutes."""
    returned_at = []
    monkeypatch.setattr(
        "forerun.engine.engine.return_freed_memory",
        lambda: returned_at.append(engine.stats().num_steps),
    )
    while engine.stats().num_steps < 3 * STEPS_BETWEEN_RETURNS:
        engine.generate([[1, 2]], PARAMS)
    assert len(returned_at) in (2, 3)
    assert returned_at[0] >= STEPS_BETWEEN_RETURNS
