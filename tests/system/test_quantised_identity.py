"""Quantised targets and self-drafts in fewer bits: no draft changes the text of its target."""

from __future__ import annotations

import pytest
import torch
from tests import natives, tiny
from tests.system.test_named_drafters import REQUESTS, answers, answers_and_counts

from forerun.control.base import Tree
from forerun.control.named import FixedController
from forerun.drafters.config import NamedDrafter
from forerun.drafters.registry import build_drafter
from forerun.engine.engine import Engine
from forerun.errors import InvalidRequest
from forerun.models.runner.native import NativeModel
from forerun.sampling.config import SamplingParams

pytestmark = pytest.mark.usefixtures("unchecked")

SELF_DRAFTS = ("int8", "int4", "int4-int8")


@pytest.fixture(scope="module", params=["auto", "int8", "int4"])
def target(request: pytest.FixtureRequest) -> NativeModel:
    network = tiny.network(num_layers=3)
    return natives.native_model(network, dtype=torch.bfloat16, weights=request.param)


@pytest.fixture(scope="module")
def expected(target: NativeModel) -> list[tuple[int, ...]]:
    return answers(tiny.engine_over(target))


def self_draft(target: NativeModel, argument: str):
    return build_drafter(NamedDrafter(name="self", argument=argument), target)


@pytest.mark.covering
@pytest.mark.parametrize("argument", SELF_DRAFTS)
@pytest.mark.parametrize("changes", [{"max_batch": 1}, {}, {"prefill_chunk": 3}], ids=str)
def test_chains_in_fewer_bits_change_no_text(target, expected, argument, changes):
    engine = tiny.engine_over(target, self_draft(target, argument), k=4, **changes)
    assert answers(engine) == expected
    assert [
        answers(engine, [request])[0] for request in REQUESTS
    ] == expected  # prompts known by now
    assert target.store.num_free == 4


def test_the_copy_mostly_agrees_with_its_target(target):
    _, found = answers_and_counts(tiny.engine_over(target, self_draft(target, "int8"), k=4))
    assert found.num_accepted > 0.5 * found.num_drafted > 20


@pytest.mark.parametrize("shape", [Tree(num_nodes=7, depth=3, width=3)], ids=str)
def test_trees_in_fewer_bits_change_no_text(target, expected, shape):
    controller = FixedController(shape, "self:int4")
    engine = tiny.engine_over(target, self_draft(target, "int4"), k=7, controller=controller)
    assert answers(engine) == expected


def test_text_without_a_seed_is_drawn_in_one_call(target, monkeypatch):
    """Passes of the draft are counted: one call of the kernels per step."""
    drafter = self_draft(target, "int4")
    calls = []
    real = drafter.model.sampled_chain
    monkeypatch.setattr(
        drafter.model, "sampled_chain", lambda *a, **k: calls.append(1) or real(*a, **k)
    )
    monkeypatch.setattr(drafter.model, "forward", None)
    engine = tiny.engine_over(target, drafter, k=4, controller=FixedController(4, "self:int4"))
    output = engine.generate([tiny.PROMPTS[0]], SamplingParams(max_tokens=20, ignore_eos=True))[0]
    assert len(output.token_ids) == 20
    assert calls


@pytest.mark.parametrize("weights", ["int8", "int4-int8"])
def test_an_engine_loads_target_and_draft_in_fewer_bits(weights):
    params = SamplingParams(temperature=0, max_tokens=24)
    options = {"device": "cpu", "max_batch": 2, "max_context": 256, "num_threads": 1}
    prompt = "def fibonacci(n):\n"
    plain = Engine.load("zoo:code-2m", weights=weights, **options)
    text = plain.generate([prompt], params)[0].text
    for draft in ("self:int4", "zoo:code-2m"):
        engine = Engine.load("zoo:code-2m", draft, weights=weights, draft_weights="int4", **options)
        assert engine.generate([prompt], params)[0].text == text


def test_a_draft_of_fewer_bytes_is_no_reason_to_warn(caplog):
    options = {"device": "cpu", "max_batch": 1, "max_context": 128, "num_threads": 1}
    Engine.load("zoo:code-2m", "zoo:code-2m", draft_weights="int4", **options)
    assert "costs more" not in caplog.text and "will cost more" not in caplog.text
    Engine.load("zoo:code-2m", "zoo:code-2m", **options)
    assert "drafting will cost more than it saves" in caplog.text


def test_other_runners_have_no_self_draft_in_fewer_bits():
    with pytest.raises(InvalidRequest, match="self:int4 needs the native runner"):
        self_draft(tiny.adapted(tiny.network()), "int4")
