"""What cannot be honoured is refused by name, with its value and what to do; nothing is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests import tiny
from tests.automaton import Automaton

from forerun.control.named import FixedController
from forerun.engine.engine import Engine
from forerun.engine.loading import as_sources
from forerun.errors import InvalidRequest
from forerun.sampling.config import SamplingParams

# Types are refused by the engine itself, as users will see it, not by the checks of the tests.
pytestmark = pytest.mark.usefixtures("unchecked")

VOCAB = 8
RUNNING = SamplingParams(seed=3, max_tokens=9, ignore_eos=True)


@pytest.fixture
def engine() -> Engine:
    target = tiny.tabular(0)
    return tiny.engine_over(target, tiny.drafting(tiny.cousin(target, 5), VOCAB))


class Allowing:
    """A token mask that returns one object, or raises it."""

    def __init__(self, found: object) -> None:
        self.found = found

    def fork(self) -> Allowing:
        return self

    def advance(self, token: int) -> None:
        """Nothing changes."""

    def allowed(self) -> object:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def refused(engine: Engine, call: Callable[[], object], message: str) -> None:
    """The call is refused while another request runs, which goes on as if nothing had been."""
    (alone,) = engine.generate([[1, 2]], RUNNING)
    running = engine.add_request([1, 2], RUNNING)
    engine.step()
    with pytest.raises(InvalidRequest, match=message):
        call()
    assert len(engine.scheduler.running) == 1
    assert not engine.scheduler.waiting
    while engine.has_unfinished:
        engine.step()
    assert engine.take_output(running).token_ids == alone.token_ids
    assert engine.target.store.num_free == 4
    assert not engine._requests
    assert not engine._keys


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {8: 1.0}}, r"logit_bias names token 8, outside 0\.\.7"),
        ({"logprobs": 9}, "logprobs is 9; the model has 8 tokens: ask for fewer"),
        (
            {"bad_token_ids": tuple(range(8))},
            "bad_token_ids names all 8 tokens; leave at least one",
        ),
        (
            {"min_tokens": 95},
            "min_tokens is 95; after a prompt of 2 tokens the context has room for 94: lower it, "
            "shorten the prompt or raise max_context",
        ),
        (
            {"min_tokens": 3, "allowed_token_ids": (0, 5), "stop_token_ids": (5,)},
            r"min_tokens is 3, but every token .* ends the text \(\[0, 5\]\): allow another",
        ),
        (
            {"min_tokens": 1, "bad_token_ids": tuple(range(1, 8))},
            r"min_tokens is 1, but every token .* ends the text \(\[0\]\)",
        ),
        (
            {"n": 1029},
            "n is 1029, but at most 1028 sequences may run and wait .*ask for fewer samples",
        ),
    ],
)
def test_parameters_that_contradict_the_model_or_each_other(
    engine: Engine, params: dict[str, object], message: str
) -> None:
    refused(engine, lambda: engine.add_request([1, 2], SamplingParams(**params)), message)
    refused(engine, lambda: engine.generate([[1], [1, 2]], SamplingParams(**params)), message)


@pytest.mark.parametrize(
    "params",
    [
        {"min_tokens": 3, "allowed_token_ids": (0, 5), "ignore_eos": True},
        {"min_tokens": 94},
        {"allowed_token_ids": (0,)},
        {"bad_token_ids": tuple(range(1, 8))},
        {"logprobs": 8},
    ],
)
def test_what_only_looks_like_a_contradiction(engine: Engine, params: dict[str, object]) -> None:
    assert engine.generate([[1, 2]], SamplingParams(seed=1, **params))[0].token_ids


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([1, 2, 3], r"prompts holds token ids \(\[1, 2, 3\]\).* as in \[\[1, 2, 3\]\]"),
        ((5,), r"prompts holds token ids \(\[5\]\)"),
        (torch.tensor([1, 2]), "prompts holds token ids"),
        (7, "prompts is 7; it must be a text or a list of prompts"),
        (None, "prompts is None"),
        (b"abc", "prompts is b'abc'"),
        ([None], "the prompt is None; it must be a text or a list of token ids"),
        ([[1.5]], "the prompt holds 1.5"),
        ([[True, 2]], "the prompt holds True"),
        ([["a", "b"]], "the prompt holds 'a'"),
        ([[[1, 2]]], r"the prompt holds \[1, 2\]"),
        ([b"abc"], "the prompt is b'abc'"),
        ([{1: 2}], "the prompt is {1: 2}"),
        ([{"role": "user"}], "the prompt is .*; for the messages of a conversation call chat"),
        ([[{"role": "user"}]], "the prompt holds .*; for the messages of a conversation call chat"),
        ([[]], "the prompt is empty"),
        ([[1], [9]], r"prompt token 9 is outside 0\.\.7"),
    ],
)
def test_prompts_that_are_none(engine: Engine, prompts: object, message: str) -> None:
    refused(engine, lambda: engine.generate(prompts, RUNNING), message)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": 0}, "params is {'temperature': 0}; give SamplingParams, or"),
        ([{"temperature": 0}], "the parameters are {'temperature': 0}; they must be Sampling"),
        ([RUNNING, RUNNING], "2 sampling parameters for 1 prompts"),
        (0.7, "params is 0.7"),
    ],
)
def test_parameters_that_are_none(engine: Engine, params: object, message: str) -> None:
    refused(engine, lambda: engine.generate([[1]], params), message)


def test_ids_may_be_integers_of_any_kind(engine: Engine) -> None:
    (expected,) = engine.generate([[1, 2]], RUNNING)
    for prompts in ([torch.tensor([1, 2])], torch.tensor([[1, 2]]), iter([(1, 2)])):
        (found,) = engine.generate(prompts, RUNNING)
        assert found.token_ids == expected.token_ids
        assert all(type(token) is int for token in found.prompt_token_ids)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (object(), "the mask is <object .*it needs fork, advance and allowed"),
        (Automaton([{0: 0}], 9), r"the mask allowed a tensor of shape \(9,\) .* of shape \(8,\)"),
        (Allowing(None), "the mask allowed NoneType, not a boolean tensor"),
        (Allowing([True] * 8), "the mask allowed list, not a boolean tensor"),
        (Allowing(torch.ones(8)), "the mask allowed a tensor .* dtype torch.float32; it must be"),
        (Allowing(RuntimeError("no rule")), r"the mask raised RuntimeError\('no rule'\)"),
        (Automaton([{}], 8), "the mask allows no first token"),
    ],
)
def test_masks_that_are_none(engine: Engine, mask: object, message: str) -> None:
    refused(engine, lambda: engine.add_request([1, 2], RUNNING, mask=mask), message)


@pytest.mark.parametrize(
    ("controller", "message"),
    [
        ("fixed", r"controller is the text 'fixed'.*EngineConfig\(controller=NAME\)"),
        ("", "controller is the text ''"),
        (4, "type int, which is no subclass of Controller"),
        (FixedController, "controller is the class FixedController; pass an object of it"),
    ],
    ids=["a name", "an empty text", "a number", "a class"],
)
def test_what_is_no_controller_is_refused_before_anything_is_loaded(controller, message):
    with pytest.raises(InvalidRequest, match=message):
        Engine.load("a folder that does not exist", controller=controller)
    target = tiny.tabular(0)
    drafter = tiny.drafting(tiny.cousin(target, 5), VOCAB)
    with pytest.raises(InvalidRequest, match=message):
        tiny.engine_over(target, drafter, controller=controller)
    with pytest.raises(InvalidRequest, match=message):
        tiny.engine_over(target).with_draft(drafter, controller=controller)


def test_a_number_of_tokens_is_no_draft() -> None:
    with pytest.raises(InvalidRequest, match=r"draft is 4; .* is num_speculative_tokens"):
        as_sources(4)
