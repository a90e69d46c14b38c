"""The sampling parameters that a model states stand for those that a request leaves out."""

from __future__ import annotations

import json
import math

import pytest
from tests import tiny

from forerun.engine.engine import Engine
from forerun.engine.loading import parse_defaults
from forerun.engine.thread import EngineThread
from forerun.errors import InvalidModel
from forerun.models.checkpoint import GGUFModel
from forerun.sampling.config import SamplingParams

STATED = {"temperature": 0.3, "top_k": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("stated")
    tiny.network().save_pretrained(path)
    tiny.backend().save_pretrained(path)
    return path


def engine_of(folder, content: str) -> Engine:
    (folder / "generation_config.json").write_text(content)
    return Engine.load(folder, config=tiny.settings(), dtype="float32", device="cpu")


def test_a_request_without_parameters_takes_what_the_model_states(folder, monkeypatch):
    engine = engine_of(folder, json.dumps(STATED | {"do_sample": True, "top_p": None}))
    seen: list[SamplingParams] = []
    check = engine.intake.check

    def noted(prompt, params, mask=None):
        seen.append(params)
        return check(prompt, SamplingParams(max_tokens=1), mask)

    for one in (engine, engine.with_draft(None)):
        monkeypatch.setattr(one.intake, "check", noted)
        one.add_request([1, 2])
        one.add_request([1, 2], SamplingParams())
        assert seen == [SamplingParams(**STATED), SamplingParams()]
        seen.clear()
    assert engine.intake.default_params == SamplingParams(**STATED)
    fresh = engine_of(folder, json.dumps(STATED))  # a thread knows only what was submitted to it
    monkeypatch.setattr(fresh.intake, "check", noted)
    with EngineThread(fresh) as running:
        running.submit([1, 2]).abort()
        running.submit([1, 2], SamplingParams()).abort()
    assert seen == [SamplingParams(**STATED), SamplingParams()]


def test_generate_takes_them_for_every_prompt(folder):
    engine = engine_of(folder, json.dumps({"temperature": 0}))
    greedy = SamplingParams(temperature=0)
    prompts = [[1, 2, 3], [4, 5]]
    texts = [output.token_ids for output in engine.generate(prompts)]
    assert texts == [output.token_ids for output in engine.generate(prompts, greedy)]


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "0.3"), ("temperature", -1), ("top_p", 0), ("top_k", 1.5), ("min_p", True)],
)
def test_a_value_that_cannot_be_used_is_refused_with_its_file(folder, name, value):
    with pytest.raises(InvalidModel, match=rf"generation_config.json has {name}={value!r}; it"):
        engine_of(folder, json.dumps({name: value}))


def test_a_file_that_says_not_to_sample_is_greedy():
    stated = {"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.1}
    assert parse_defaults(stated, "file") == {"temperature": 0.0, "repetition_penalty": 1.1}
    assert parse_defaults(stated | {"do_sample": None}, "file")["temperature"] == 0.7
    with pytest.raises(InvalidModel, match="file has do_sample='no'; it must be true or false"):
        parse_defaults({"do_sample": "no"}, "file")


def test_whole_numbers_may_be_floats():
    (value,) = parse_defaults({"top_k": 50.0}, "file").values()
    assert value == 50 and type(value) is int


def test_they_are_read_before_the_weights(folder, monkeypatch):
    monkeypatch.delattr("forerun.engine.loading.load_model")
    with pytest.raises(InvalidModel, match=r"top_k=1\.5"):
        engine_of(folder, json.dumps({"top_k": 1.5}))


def test_values_that_json_cannot_write_are_refused_too():
    with pytest.raises(InvalidModel, match=r"a\.gguf has general\.sampling\.temp=nan; it must be"):
        parse_defaults({"temperature": math.nan}, "a.gguf", GGUFModel.generation_names)


def test_a_temperature_too_small_to_divide_by_is_greedy():
    assert parse_defaults({"temperature": 1e-6}, "file") == {"temperature": 0.0}
    assert parse_defaults({"max_new_tokens": 5, "do_sample": True}, "file") == {}
