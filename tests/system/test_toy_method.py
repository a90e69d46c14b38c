"""A new drafting method touches one file or folder, and one row of the table of methods.

The file is `tests/lab/toy_method.py`; the row is registered here, where a method of forerun has its
row in `drafters/config.py`. Nothing else names it: not the engine, not the command line.
"""

from __future__ import annotations

import pytest
from tests.lab import toy_method

from forerun.drafters.config import METHODS, DraftingMethod
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.errors import InvalidModel, InvalidRequest
from forerun.sampling.config import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["import os", "def f(x):"]


@pytest.fixture
def registered(monkeypatch):
    row = DraftingMethod(name="toy", build=toy_method.build_toy, check=toy_method.check_toy)
    monkeypatch.setattr("forerun.drafters.config.METHODS", [*METHODS, row])
    monkeypatch.setattr("forerun.drafters.registry.METHODS", [*METHODS, row])


@pytest.mark.parametrize("controller", ["fixed", "auto"])
def test_a_toy_method_is_chosen_by_its_name_and_emits_the_targets_own_text(
    registered, tiny_pair, controller
):
    config = EngineConfig(controller=controller, num_speculative_tokens=3, max_batch=2)
    engine = Engine.load(tiny_pair.target, draft="toy:2", dtype="float32", config=config)
    assert engine.capabilities().methods == ("toy",)
    plain = engine.with_draft(None)
    found, expected = engine.generate(PROMPTS, GREEDY), plain.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert sum(output.completions[0].acceptance.num_drafted for output in found) > 0


def test_its_argument_is_checked_before_weights_are_read(registered, tiny_pair):
    with pytest.raises(InvalidRequest, match="toy:x: give the most tokens"):
        Engine.load(tiny_pair.target, draft="toy:x")


def test_without_its_row_it_is_no_drafting_method(tiny_pair):
    with pytest.raises(InvalidModel):
        Engine.load(tiny_pair.target, draft="toy:2")
